"""A bench of one pass of a stage at a real model's width, with random 4-bit weights: the cost of rows.

    python -m tests.bench.stage

On a GPU 16 layers as wide as Qwen3.5-27B's, 5 GB; on a CPU 4 of an eighth of that width.

A pass is timed from its tokens to its hidden states and caches. Passes alternate between two orders: each layer is
evaluated as soon as it is built, as in `Stage.forward`, or all layers are evaluated at the end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.parts import part_module
from mtp.head.attention import KVFormat
from proto.frame import Admit, Segment
from proto.span import Span
from tests.bench.machine import about
from tests.bench.report import bars, publish
from tests.support.checkpoints.checkpoints import config_of
from worker.model.loader import StageModules
from worker.model.stage import Run, Stage

SHAPES = ((1, 1), (1, 2), (1, 4), (4, 1), (8, 1), (4, 2))
"""Number of sequences, and tokens of each."""

CAPACITY = 4096


class LateStage(Stage):
    """A stage that builds every layer before it computes the first."""

    def forward(self, x: mx.array, runs: Sequence[Run]) -> mx.array:
        for sequence, segment in runs:
            sequence.extend(segment)
        for index, layer in enumerate(self.modules.layers):
            x = self._layer(layer, index, x, runs)
        return x


def wide_config(eighths: int, layers: int) -> ModelConfig:
    """Return layers of `eighths` eighths of the width of Qwen3.5-27B."""
    config = config_of(
        moe=False, layers=layers, hidden=640 * eighths, vocab=4096, tie=False, dtype=mx.bfloat16
    )
    config["text_config"] |= {
        "intermediate_size": 2176 * eighths,
        "num_attention_heads": 3 * eighths,
        "num_key_value_heads": max(eighths // 2, 1),
        "head_dim": 256,
        "linear_num_value_heads": 6 * eighths,
        "linear_num_key_heads": 2 * eighths,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    return ModelConfig.parse(Path("config.json"), config)


def random_stage(config: ModelConfig) -> StageModules:
    """Return all layers and the embedding."""

    def part(name: str) -> Any:
        holder = nn.Module()
        holder.part = part_module(config, name)
        holder.set_dtype(mx.bfloat16)
        nn.quantize(holder, group_size=64, bits=4)
        mx.eval(holder.parameters())
        return holder.part.eval()

    layers = [part(f"layers.{index}") for index in range(config.num_layers)]
    return StageModules(config, Span(0, config.num_layers), layers, part("embed"))


class Passes:
    """Time decode steps of `count` sequences with `width` tokens each through one stage."""

    def __init__(self, stage: Stage, count: int, width: int) -> None:
        self.stage = stage
        self.width = width
        self.sequences = [stage.new_sequence(Admit(i, CAPACITY, 1)) for i in range(count)]
        self.seconds: list[float] = []
        self._done = 0

    def step(self) -> None:
        tokens = tuple(range(1, self.width + 1))
        position = self._done * self.width
        segments = [Segment(i, self._done, position, tokens) for i in range(len(self.sequences))]
        started = time.perf_counter()
        x = self.stage.embed(
            mx.array([t for segment in segments for t in segment.tokens], mx.uint32)
        )
        x = self.stage.forward(x, list(zip(self.sequences, segments, strict=True)))
        mx.eval(x, *(array for sequence in self.sequences for array in sequence.arrays()))
        self.seconds.append(time.perf_counter() - started)
        self._done += 1

    @property
    def ms(self) -> float:
        """Return the median without the first steps, which compile."""
        return statistics.median(self.seconds[2:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    gpu = mx.default_device().type == mx.gpu
    parser.add_argument("--eighths", type=int, choices=(1, 2, 4, 8), default=8 if gpu else 1)
    parser.add_argument("--layers", type=int, default=16 if gpu else 4)
    parser.add_argument("--rounds", type=int, default=24 if gpu else 8)
    options = parser.parse_args()
    modules = random_stage(wide_config(options.eighths, options.layers))
    print(f"{about()}\n{mx.default_device()}, {options}\n", flush=True)
    print("| sequences x tokens | at the end, ms | layer by layer, ms | times as fast |")
    print("| --- | --- | --- | --- |")
    found = {}
    for count, width in SHAPES:
        late = Passes(LateStage(modules, KVFormat()), count, width)
        early = Passes(Stage(modules, KVFormat()), count, width)
        for _ in range(options.rounds):
            late.step()
            early.step()
        ratio = statistics.median(
            a / b for a, b in zip(late.seconds[2:], early.seconds[2:], strict=True)
        )
        name = f"{count} x {width}"
        found[name] = {"late": late.ms, "early": early.ms, "ratio": ratio}
        print(f"| {name} | {late.ms:.2f} | {early.ms:.2f} | {ratio:.2f} |", flush=True)
    ratios = {name: row["ratio"] for name, row in found.items()}
    publish(
        "stage",
        {"options": vars(options), "passes": found},
        {"layer by layer": bars(ratios, "times as fast")},
    )


if __name__ == "__main__":
    main()
