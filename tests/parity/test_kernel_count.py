"""The kernels of a layer on the Metal path, counted in the lazy graph."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mtp.flash_next.args import IndexerArgs
from mtp.flash_next.layers import sparse_attention
from tests.bench.dialled_model import ModelShape, write_dialled_model
from tests.support.metal.kernel_count import (
    LONG,
    SHORT,
    OwnSteps,
    StockSteps,
    counted_kernels,
    kernels_of,
    layer_cost,
    write_models,
    zeros,
)

MOST_KERNELS = {(1, 1): 9.75, (1, 4): 9.75, (8, 1): 13.5}
"""Kernels a layer for sequences and tokens of each. A change that adds one says here what it pays for."""

EXPERTS_KERNELS = {(1, 1): 11.75, (1, 4): 11.75, (8, 1): 15.5}
"""The same for a mixture of experts, whose MLP has four of them, its norm and its residual."""

FLASH_NEXT_KERNELS = {(1, 1): 20.25, (1, 4): 20.25, (8, 1): 27.5}
"""The same for Flash-Next. Eleven of them are those of the residual streams."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[int, Path]]:
    folder = tmp_path_factory.mktemp("models")
    return {moe: write_models(folder / str(moe), moe=moe) for moe in (False, True)}


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("shape", MOST_KERNELS)
def test_a_layer_launches_no_more_kernels(
    models: dict[bool, dict[int, Path]], shape: tuple[int, int], moe: bool
) -> None:
    """A 4-bit layer stays at its number of kernels: less than half of stock mlx-lm's, with experts about a quarter."""
    with counted_kernels():
        own, stock = (layer_cost(steps, models[moe], *shape) for steps in (OwnSteps, StockSteps))
    assert own.kernels <= (EXPERTS_KERNELS if moe else MOST_KERNELS)[shape], own.names
    assert stock.kernels == (43.75 if moe else 24.75), stock.names


@pytest.mark.parametrize("shape", FLASH_NEXT_KERNELS)
def test_a_layer_of_flash_next(tmp_path: Path, shape: tuple[int, int]) -> None:
    """The streams of a layer cost eleven kernels, its experts four, and its GatedDeltaNet one and its projections."""
    paths = {layers: tmp_path / str(layers) for layers in (SHORT, LONG)}
    for layers, path in paths.items():
        sizes = {"vocab": 4096, "experts": 32, "per_token": 4, "ngram_rows": 400}
        write_dialled_model(path, ModelShape(256, layers, 4, 2, 16, 128, **sizes), bits=4)
    with counted_kernels():
        own = layer_cost(OwnSteps, paths, *shape)
    assert own.kernels <= FLASH_NEXT_KERNELS[shape], own


def test_the_attention_to_chosen_blocks() -> None:
    """Choosing blocks, reading and attending take eleven kernels, two of which read keys and values."""
    shapes = (1, 4, 1, 16), (1, 2, 400, 16), (1, 4, 16), (100, 16)
    q, keys, queries, blocks = (zeros(shape, mx.float32) for shape in shapes)
    with counted_kernels():
        args = queries, blocks, 399, IndexerArgs(4, 16, 32, 4), 0.25
        kernels = kernels_of([sparse_attention(q, keys, keys, *args)])
    assert kernels.total() <= 11, kernels
    assert kernels["Gather"] == 2
