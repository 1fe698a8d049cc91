"""A bench of the time of a step by the length of the text before it, on a GPU with CUDA kernels.

    python -m tests.bench.long_texts

The layers are as wide as those of 27B, a fourth of their number, with random weights of 4 bits. A step reads the keys
and values of the whole text. Where MLX copies them too, a step after a long text takes much longer.
"""

from __future__ import annotations

import argparse
import statistics
import time

import mlx.core as mx

from mtp.layers.layer import KVFormat
from proto.frame import Admit, Segment
from tests.bench.machine import about
from tests.bench.report import bars, publish
from tests.support.stages.random_stage import random_stage, wide_config
from worker.model.stage import Stage

CHUNK = 2048
"""Tokens of a part of the text."""

STEPS, WARM_UP = 80, 10


class Text:
    """A sequence of random rows on a stage."""

    def __init__(self, stage: Stage, length: int) -> None:
        self.stage, self.hidden = stage, stage.modules.config.hidden_size
        self.sequence = stage.new_sequence(Admit(0, length + 8 * STEPS, 1))
        self.windows = 0
        for start in range(0, length, CHUNK):
            self.run(min(CHUNK, length - start))

    def run(self, width: int) -> float:
        """Return the seconds of a window of `width` rows."""
        x = mx.random.normal((width, self.hidden)).astype(mx.bfloat16)
        mx.eval(x)
        position = self.sequence.stack.length
        segment = Segment(0, self.windows, position, (1,) * width)
        self.windows += 1
        started = time.perf_counter()
        mx.eval(self.stage.forward(x, [(self.sequence, segment)]))
        return time.perf_counter() - started


def main() -> None:
    """Measure every length and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16384, 30208])
    options = parser.parse_args()
    stage = Stage(random_stage(wide_config(8, options.layers)), KVFormat())
    print(f"{about()}\n{stage.variants.summary}\n| tokens before | 1 row, ms | 4 rows, ms |")
    found: dict[str, list[float]] = {}
    for length in options.lengths:
        text = Text(stage, length)
        row = [
            1e3 * statistics.median([text.run(width) for _ in range(STEPS)][WARM_UP:])
            for width in (1, 4)
        ]
        found[str(length)] = row
        print(f"| {length:,} | {row[0]:.2f} | {row[1]:.2f} |", flush=True)
    publish(
        "long_texts",
        {"options": vars(options), "rows": found},
        {"1 row": bars({length: row[0] for length, row in found.items()}, "ms")},
    )


if __name__ == "__main__":
    main()
