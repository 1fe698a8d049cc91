"""The trial of the window kernel: its results and its time beside the operations that it replaces.

Both compute the same rows at the shapes of the model, on the machine that will serve. Which of them is faster there is
unknown before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from mtp.layers.layer import KernelTrial, KVFormat
from mtp.layers.reference.gdn import GDNLayer
from mtp.layers.windows import (
    Recurrence,
    SnapshotGDNCache,
    Window,
    record_windows,
    run_windows,
)

BATCHES = ((1, 1), (1, 4), (8, 1))
"""Sequences and tokens of each. They are those of plain decoding, of drafts and of several clients."""

STEPS = 8
"""Steps of one evaluation. Each needs the states of the one before, as in an answer."""

ROUNDS = 7
"""Evaluations of each, in turn. Their medians count."""

TRIAL_SECONDS = 2.0
"""Seconds after which no further round begins."""

TOLERANCE = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 5e-2}
"""Largest difference over the largest result. Both round to `dtype` at different places."""

Steps = Callable[[int], list[mx.array]]
"""A function that computes a number of steps. It returns the last outputs, the last inputs and the states."""


def try_window_kernel(
    layer: GDNLayer, recurrence: Recurrence, dtype: mx.Dtype, *, timed: bool
) -> KernelTrial:
    """Return the trial of the kernel of `recurrence` in `layer`, without times unless `timed`."""
    due = time.monotonic() + TRIAL_SECONDS
    trial = KernelTrial()
    try:
        for sequences, tokens in BATCHES:
            shape = (sequences * tokens, recurrence.shape.row)
            rows = mx.random.normal(shape, key=mx.random.key(5)).astype(dtype)
            own: Steps = partial(_own_steps, recurrence, dtype, rows, sequences, tokens)
            replaced: Steps = partial(_replaced_steps, layer, rows, sequences, tokens)
            if problem := _difference(own(2), replaced(2), TOLERANCE[dtype]):
                return KernelTrial(problem=problem)
            if timed:
                mine, others = _median_seconds(own, replaced, due)
                trial = KernelTrial(trial.own + mine, trial.mlx + others)
    except Exception as error:  # whatever the compiler of a machine finds wrong
        return KernelTrial(problem=str(error)[:300])
    return trial


def _median_seconds(first: Steps, second: Steps, due: float) -> tuple[float, float]:
    """Return the seconds of a step of each, from evaluations in turn that begin before `due`."""
    times: list[tuple[float, float]] = []
    while not times or (len(times) < ROUNDS and time.monotonic() < due):
        moments = [time.perf_counter()]
        for run in (first, second):
            mx.eval(run(STEPS))
            moments.append(time.perf_counter())
        times.append((moments[1] - moments[0], moments[2] - moments[1]))
    own, other = zip(*times, strict=True)
    return statistics.median(own) / STEPS, statistics.median(other) / STEPS


def _difference(own: list[mx.array], replaced: list[mx.array], tolerance: float) -> str:
    """Return which results differ by more than the tolerance, or an empty string."""
    for name, a, b in zip(("outputs", "inputs", "states"), own, replaced, strict=True):
        a, b = a.astype(mx.float32), b.astype(mx.float32)
        largest, apart = mx.abs(b).max(), mx.abs(a - b).max()
        if not (apart <= tolerance * largest).item():  # also for NaN
            return (
                f"its {name} differ by {apart.item():.2g} where the largest is {largest.item():.2g}"
            )
    return ""


def _own_steps(
    recurrence: Recurrence, dtype: mx.Dtype, rows: mx.array, sequences: int, tokens: int, steps: int
) -> list[mx.array]:
    caches = [SnapshotGDNCache.empty(recurrence, dtype) for _ in range(sequences)]
    for _ in range(steps):
        windows = [
            Window(cache.point, i * tokens, tokens, stays_open=False)
            for i, cache in enumerate(caches)
        ]
        y, saved = run_windows(recurrence, rows, windows)
        record_windows(caches, windows, rows, saved)
    return [y, saved.conv, saved.state]


def _replaced_steps(
    layer: GDNLayer, rows: mx.array, sequences: int, tokens: int, steps: int
) -> list[mx.array]:
    net = layer.net
    ends = [net.conv_dim, net.conv_dim + net.value_dim]
    ends.append(ends[1] + net.num_v_heads)
    qkv, z, b, a = mx.split(rows, ends, axis=-1)
    inner: list[Any] = [t.reshape(sequences, tokens, -1) for t in (qkv, a, b)]
    caches = [layer.new_cache(KVFormat()) for _ in range(sequences)]
    for _ in range(steps):
        out = layer.advance(caches, [False] * sequences, *inner)
        y = net.norm(out, z.reshape(out.shape)).reshape(rows.shape[0], -1)
    return [
        y,
        mx.concatenate([cache.conv for cache in caches]),
        mx.concatenate([cache.state for cache in caches]),
    ]
