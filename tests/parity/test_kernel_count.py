"""The kernels of a layer on the Metal path, counted in the lazy graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.dialled_model import ModelShape, write_dialled_model
from tests.support.metal.kernel_count import (
    LONG,
    SHORT,
    OwnSteps,
    StockSteps,
    counted_kernels,
    layer_cost,
    write_models,
)

MOST_KERNELS = {(1, 1): 9.75, (1, 4): 9.75, (8, 1): 13.5}
"""Kernels a layer for sequences and tokens of each. A change that adds one says here what it pays for."""

EXPERTS_KERNELS = {(1, 1): 11.75, (1, 4): 11.75, (8, 1): 15.5}
"""The same for a mixture of experts, whose MLP has four of them, its norm and its residual."""

FLASH_NEXT_KERNELS = {(1, 1): 20.5, (1, 4): 20.5, (8, 1): 33.0}
"""The same for Flash-Next. Eleven of them are those of the residual streams."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("shape", MOST_KERNELS)
def test_a_layer_launches_no_more_kernels(models: dict[int, Path], shape: tuple[int, int]) -> None:
    """A 4-bit layer stays at its number of kernels, which is less than that of stock mlx-lm."""
    with counted_kernels():
        own, stock = (layer_cost(steps, models, *shape) for steps in (OwnSteps, StockSteps))
    assert own.kernels <= MOST_KERNELS[shape], own.names
    assert stock.kernels == 24.75, stock.names


@pytest.mark.parametrize("shape", EXPERTS_KERNELS)
def test_a_mixture_of_experts(tmp_path: Path, shape: tuple[int, int]) -> None:
    """A layer with experts launches about a quarter of the kernels of stock mlx-lm."""
    paths = write_models(tmp_path, moe=True)
    with counted_kernels():
        own, stock = (layer_cost(steps, paths, *shape) for steps in (OwnSteps, StockSteps))
    assert own.kernels <= EXPERTS_KERNELS[shape], own.names
    assert stock.kernels == 43.75, stock.names


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
