"""A bench of a layer on a Mac, without one: the kernels it launches, and the time in which Python builds it.

    python -m tests.bench.kernels

The Metal path is forced, and kernels are counted in the lazy graph of a 4-bit model. Rounds of a stage and of stock
mlx-lm alternate. A layer is the mean of three GDN layers and one of attention.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.bench.machine import about
from tests.bench.report import bars, publish
from tests.support.metal.kernel_count import (
    LayerCost,
    OwnSteps,
    Steps,
    StockSteps,
    counted_kernels,
    layer_cost,
    write_models,
)

SHAPES = ((1, 1), (1, 4), (8, 1))
"""Sequences, and tokens of each."""

LOOPS: dict[str, Callable[[Path, int, int], Steps]] = {
    "stock mlx-lm": StockSteps,
    "stage": OwnSteps,
}


def measure(rounds: int) -> dict[str, dict[str, LayerCost]]:
    """Return the cost of a layer by shape and by loop."""
    found: dict[str, dict[str, LayerCost]] = {}
    with tempfile.TemporaryDirectory() as folder, counted_kernels():
        paths = write_models(Path(folder))
        for count, width in SHAPES:
            found[f"{count} x {width}"] = {
                name: layer_cost(steps, paths, count, width, rounds)
                for name, steps in LOOPS.items()
            }
    return found


def main() -> None:
    """Print the table and publish it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--names", action="store_true", help="print the operations of each layer")
    options = parser.parse_args()
    print(f"{about()}\n{options}\n", flush=True)
    found = measure(options.rounds)
    print("| sequences x tokens | | kernels a layer | us to build a layer |")
    print("| --- | --- | --- | --- |")
    for shape, costs in found.items():
        for name, cost in costs.items():
            cells = f"{cost.kernels:.2f} | {cost.microseconds:.0f}"
            print(f"| {shape} | {name} | {cells} |")
            if options.names:
                print(f"    {cost.names}")
    figures = {shape: {n: vars(c) for n, c in costs.items()} for shape, costs in found.items()}
    kernels = {f"{s}, {n}": c.kernels for s, costs in found.items() for n, c in costs.items()}
    publish("kernels", figures, {"Metal path": bars(kernels, "kernels a layer")})


if __name__ == "__main__":
    main()
