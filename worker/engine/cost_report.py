"""The times of a window's parts on this machine: products of few rows, attention, a launch, and a read of memory.

Every call of a chain needs the result of the one before, as layers do, because a GPU runs independent calls at once.
Weights rotate over copies, or caches would hold them. The sides of a comparison run in turns.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.parts import part_module, read_part
from mtp.device import this_device
from mtp.layers.few_rows import Step, Weights, can_multiply, multiply_few, time_chain
from mtp.layers.kv_cache import tiled_attention
from mtp.layers.linear import Format
from proto.span import Span
from worker.engine.hardware import default_memory_limit, read_speed

ROWS, CONTEXTS, QUERIES = (1, 2, 4, 5, 8, 12, 16), (2048, 32768), (1, 4, 8)
"""Rows of a product; tokens of a context, and rows of a window at its end."""

SECONDS, ROUNDS, CHAIN_SECONDS, MOST_STEPS = 45.0, 5, 0.03, 512
"""Seconds of all times together; chains of each side, whose median counts, and bounds of the steps of one. A round trip
of .2 ms hides in a chain. A call that has begun ends, and weights are made besides: below a minute together."""

COMPILE_SECONDS = 2.0
"""Seconds. A longer first call is that of a slow product, not of a compiler."""

MOST_PRODUCTS, MEMORY_SHARE, MOST_COPIES, COPY_BYTES = 6, 0.25, 8, 256 * 10**6
"""Products of a model, the largest ones; the largest array as a share of the memory limit; copies of the weights, and
the bytes of all copies, unless one alone has more."""

Costs = tuple[str, dict[str, Any], str]
"""Times for people and as plain JSON values, and the problems of kernels, empty for none."""


@dataclass(frozen=True)
class LinearShape:
    """The shape and the format of the weights of linear layers."""

    outputs: int
    inputs: int
    format: Format

    def __str__(self) -> str:
        kind = self.format
        text = f"{kind.mode} {kind.bits} bits in groups of {kind.group_size}" if kind.bits else "not quantized"
        return f"{self.outputs} x {self.inputs}, {text}"

    def weights(self, dtype: mx.Dtype) -> list[Weights]:
        """Return copies of random weights. Their rows repeat, so that values before packing take little memory.

        The first output is zero. See `_add_product`.
        """
        block = mx.random.normal((min(self.outputs, 512), self.inputs), scale=0.02, key=mx.random.key(7)).astype(dtype)
        block[0] = 0
        kind, repeats = self.format, -(-self.outputs // block.shape[0])
        parts = (block,) if kind.bits is None else mx.quantize(block, kind.group_size, kind.bits, kind.mode)
        copies = range(max(1, min(MOST_COPIES, COPY_BYTES // (repeats * sum(part.nbytes for part in parts)))))
        found = [tuple(mx.contiguous(mx.tile(part, (repeats, 1))[: self.outputs]) for part in parts) for _ in copies]
        mx.eval(found)
        return found


_AFFINE = Format(4, 64, "affine")
LARGE = LinearShape(17408, 5120, _AFFINE), LinearShape(5120, 17408, _AFFINE), LinearShape(248320, 5120, _AFFINE)
"""The large products of Qwen3.5-27B, so that reports compare whatever their models are."""


def model_shapes(checkpoint: Checkpoint) -> list[LinearShape]:
    """Return the shapes of a model's linear layers as they are stored, those with the most bytes first."""
    config, found = checkpoint.config, Counter[LinearShape]()
    for part in checkpoint.stage_parts(Span(0, config.num_layers), first=True, last=True, with_head=False):
        stored, is_tied = read_part(checkpoint, part, None), part == "embed" and config.tie_word_embeddings
        for path, leaf in part_module(config, part).named_modules():
            weight, scales = (stored.get(f"{path}.{name}".lstrip(".")) for name in ("weight", "scales"))
            if weight is not None and isinstance(leaf, nn.Embedding if is_tied else nn.Linear):
                outputs, inputs = leaf.weight.shape
                kind = Format() if scales is None else Format.stored(weight, scales, inputs)
                found[LinearShape(outputs, inputs, kind)] += weight.nbytes
    return [shape for shape, _ in found.most_common()]


class CostReport:
    """The parts of the report for one model, by name. They share `seconds`, which begin with this object."""

    def __init__(self, checkpoint: Checkpoint, seconds: float = SECONDS, large: Sequence[LinearShape] = LARGE) -> None:
        self._dtype = {"F16": mx.float16, "F32": mx.float32}.get(checkpoint.norm_type, mx.bfloat16)
        room, text = default_memory_limit() * MEMORY_SHARE, checkpoint.config.text_config
        self.parts: dict[str, Callable[[], Costs]] = {"launch and memory": self._measure_machine}
        # Layers that keep latents have no heads of keys.
        if heads := 0 if "kv_lora_rank" in text else text.get("num_attention_heads", 0):
            kv_heads = text.get("num_key_value_heads") or heads
            dim = text.get("head_dim") or checkpoint.config.hidden_size // heads
            fitting = (tokens for tokens in CONTEXTS if 8 * kv_heads * dim * tokens <= room)
            measure = partial(self._measure_attention, heads, kv_heads, dim)
            self.parts |= {f"attention to {tokens} tokens": partial(measure, tokens) for tokens in fitting}
        for shape in (*model_shapes(checkpoint)[:MOST_PRODUCTS], *large):
            if shape.outputs * shape.inputs * (shape.format.bits or 16) / 8 <= room:
                self.parts[f"product {shape}"] = partial(self._measure_product, shape)
        self._due, self._left = time.monotonic() + seconds, len(self.parts)
        self._paces: dict[Format, float] = {}
        """Seconds of a weight and a row by format, in the product where they are fewest."""

    def _measure_machine(self) -> Costs:
        one, speed = mx.ones((8,)), read_speed()
        text, values, problem = self._measure({"launch": lambda x, more: x + more[0]}, {1: one}, [(one,)])
        return f"{text}; one read of memory {speed / 1e9:.4g} GB/s", values | {"bytes_per_second": speed}, problem

    def _measure_attention(self, heads: int, kv_heads: int, dim: int, tokens: int) -> Costs:
        shape = 2, 1, kv_heads, tokens, dim
        caches = [(mx.random.normal(shape, key=mx.random.key(i)).astype(self._dtype),) for i in range(2)]
        mx.eval(caches)
        rows = {count: mx.ones((1, heads, count, dim), self._dtype) for count in QUERIES}

        def attend(q: mx.array, cache: Weights) -> mx.array:
            return tiled_attention(q, cache[0][0], cache[0][1], tokens - q.shape[2], dim**-0.5)

        text, values, problem = self._measure({"MLX": attend}, rows, caches)
        return text, {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "tokens": tokens, **values}, problem

    def _measure_product(self, shape: LinearShape) -> Costs:
        copies, sides = shape.weights(self._dtype), {"MLX": partial(_add_product, shape.format.multiply)}
        if this_device().backend == "metal" and can_multiply(shape.format, copies[0], self._dtype):
            sides["own"] = partial(_add_product, partial(multiply_few, shape.format))
        rows = {count: mx.ones((count, shape.inputs), self._dtype) for count in ROWS}
        paces, weights = self._paces, shape.outputs * shape.inputs
        text, values, problem = self._measure(sides, rows, copies, paces.get(shape.format, 0.0) * weights)
        if (first := values["ms"]["MLX"][0]) is not None:
            paces[shape.format] = min(first / 1e3 / weights, paces.get(shape.format, 1.0))
        return text, {"outputs": shape.outputs, "inputs": shape.inputs, **asdict(shape.format), **values}, problem

    def _measure(
        self, sides: Mapping[str, Step], rows: Mapping[int, mx.array], weights: Sequence[Weights], pace: float = 0.0
    ) -> Costs:
        """Measure each side for each number of rows. A time is None if the side fails or would take too long.

        `pace` is what one row is expected to take.
        """
        found: dict[str, list[float | None]] = {name: [] for name in sides}
        problems, began = dict[str, str](), time.monotonic()
        due = began + max(0.0, self._due - began) / self._left
        self._left -= 1
        for i, (count, x) in enumerate(rows.items()):
            share = max(0.0, due - time.monotonic()) / (len(rows) - i)
            took = _race(sides, x, weights, share, problems) if 3 * pace * count <= share else {}
            pace = sum(took.values()) / count or pace
            for name, times in found.items():
                times.append(round(took[name] * 1e3, 5) if name in took else None)
        texts = (f"{name} {' '.join('-' if ms is None else f'{ms:.3g}' for ms in found[name])} ms" for name in found)
        figure = f"{', '.join(texts)} for {', '.join(map(str, rows))} rows"
        return figure, {"rows": list(rows), "ms": found}, "; ".join(problems.values())


def _race(
    sides: Mapping[str, Step], x: mx.array, weights: Sequence[Weights], seconds: float, problems: dict[str, str]
) -> dict[str, float]:
    """Return the median seconds of a step of each side that adds no problem. No turn begins after `seconds`.

    The first two turns compile, and find the steps of the others. A first one of COMPILE_SECONDS does not count.
    """
    began, times = time.monotonic(), {name: list[float]() for name in sides if name not in problems}
    due = began + seconds
    for turn in range(2 + ROUNDS):
        if turn and time.monotonic() > due:
            break
        for name in sorted(times, reverse=turn % 2 == 1):
            steps = max(1, min(MOST_STEPS, int(CHAIN_SECONDS / times[name][-1]))) if turn else 1
            try:
                times[name].append(time_chain(sides[name], x, weights, steps))
            except Exception as error:  # whatever the compiler of a machine finds wrong
                problems[name] = f"{name} failed: {str(error)[:300]}"
                del times[name]
        if turn == 0 and (now := time.monotonic()) - began < COMPILE_SECONDS:
            due = now + seconds
    return {name: statistics.median(found[2:] or found[-1:]) for name, found in times.items()}


def _add_product(product: Step, x: mx.array, weights: Weights) -> mx.array:
    """Return `x` plus the first output of each row, zero: a launch more, for which the next product waits."""
    return x + product(x, weights)[:, :1]
