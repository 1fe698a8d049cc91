"""The kernels of a layer on the Metal path, counted in the lazy graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.metal.kernel_count import (
    OwnSteps,
    StockSteps,
    counted_kernels,
    layer_cost,
    write_models,
)

MOST_KERNELS = {(1, 1): 9.75, (1, 4): 9.75, (8, 1): 13.5}
"""Kernels a layer for sequences and tokens of each. A change that adds one says here what it pays for."""


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
