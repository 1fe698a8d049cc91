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


each_shape = pytest.mark.parametrize(
    "shape", [(1, 1), pytest.param((1, 4), marks=pytest.mark.thorough), (8, 1)], ids=str
)


@pytest.mark.parametrize("moe", [False, True])
@each_shape
def test_a_layer_launches_no_more_kernels(
    models: dict[bool, dict[int, Path]], shape: tuple[int, int], moe: bool
) -> None:
    """A 4-bit layer stays at its number of kernels: less than half of stock mlx-lm's, with experts about a quarter."""
    with counted_kernels():
        own, stock = (layer_cost(steps, models[moe], *shape) for steps in (OwnSteps, StockSteps))
    assert own.kernels <= (EXPERTS_KERNELS if moe else MOST_KERNELS)[shape], own.names
    assert stock.kernels == (43.75 if moe else 24.75), stock.names


@pytest.fixture(scope="module")
def flash_next(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("flash-next")
    sizes = {"vocab": 4096, "experts": 32, "per_token": 4, "ngram_rows": 400}
    for layers in (SHORT, LONG):
        shape = ModelShape(256, layers, 4, 2, 16, 128, **sizes)
        write_dialled_model(folder / str(layers), shape, bits=4)
    return {layers: folder / str(layers) for layers in (SHORT, LONG)}


@each_shape
def test_a_layer_of_flash_next(flash_next: dict[int, Path], shape: tuple[int, int]) -> None:
    """The streams of a layer cost eleven kernels, its experts four, and its GatedDeltaNet one and its projections."""
    with counted_kernels():
        own = layer_cost(OwnSteps, flash_next, *shape)
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
