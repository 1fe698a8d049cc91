"""The trial of a kernel: a layer with it beside the same layer without it, their results and their times.

Both compute the same rows at the shapes of the model, on the machine that will serve. Which of them is faster there is
unknown before.
"""

from __future__ import annotations

import statistics
import time

import mlx.core as mx

from mtp.layers.layer import KernelTrial, KVFormat, Layer

BATCHES = ((1, 1), (1, 4), (8, 1))
"""Sequences and tokens of each. They are those of plain decoding, of drafts and of several clients."""

STEPS = 8
"""Steps of one evaluation. Each needs the rows and the states of the one before, as in an answer."""

ROUNDS = 7
"""Evaluations of each, in turn. Their medians count."""

TRIAL_SECONDS = 0.6
"""Seconds of a trial after which no further round begins. A model has up to three trials."""

INPUT = 0.03
"""Root mean square of the rows. Against larger ones, what a layer adds would be lost in their rounding."""

TOLERANCE = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 1e-1}
"""Largest norm of the difference over the norm of the result. Both round to `dtype` at different places."""


def try_layer(own: Layer, replaced: Layer, hidden: int, dtype: mx.Dtype) -> KernelTrial:
    """Return the trial of the kernel that `own` has and `replaced` has not, for rows `[…, hidden]` of `dtype`."""
    due, times = time.monotonic() + TRIAL_SECONDS, (0.0, 0.0)
    try:
        for sequences, tokens in BATCHES:
            x = mx.random.normal((sequences * tokens, hidden), scale=INPUT, key=mx.random.key(5))
            x = x.astype(dtype)
            found, expected = (_added(layer, x, sequences, 2) for layer in (own, replaced))
            if problem := _difference(found, expected, TOLERANCE[dtype]):
                return KernelTrial(problem=problem)
            medians = _median_seconds(own, replaced, x, sequences, due)
            times = (times[0] + medians[0], times[1] + medians[1])
    except Exception as error:  # whatever the compiler of a machine finds wrong
        return KernelTrial(problem=str(error)[:300])
    return KernelTrial(*times)


def _median_seconds(
    own: Layer, replaced: Layer, x: mx.array, sequences: int, due: float
) -> tuple[float, float]:
    """Return the seconds of a step of each, from evaluations in turn that begin before `due`."""
    times: list[tuple[float, float]] = []
    while not times or (len(times) < ROUNDS and time.monotonic() < due):
        moments = [time.perf_counter()]
        for layer in (own, replaced):
            mx.eval(_added(layer, x, sequences, STEPS))
            moments.append(time.perf_counter())
        times.append((moments[1] - moments[0], moments[2] - moments[1]))
    mine, others = zip(*times, strict=True)
    return statistics.median(mine) / STEPS, statistics.median(others) / STEPS


def _added(layer: Layer, x: mx.array, sequences: int, steps: int) -> mx.array:
    """Return what `steps` steps of the layer add to `x`."""
    caches = [layer.new_cache(KVFormat()) for _ in range(sequences)]
    widths, start = [x.shape[0] // sequences] * sequences, x
    for _ in range(steps):
        x = layer.add(x, caches, widths, [False] * sequences)
    return x - start


def _difference(own: mx.array, replaced: mx.array, tolerance: float) -> str:
    """Return how the results differ if they do so by more than the tolerance, or an empty string."""
    own, replaced = own.astype(mx.float32), replaced.astype(mx.float32)
    apart, norm = mx.linalg.norm((own - replaced).reshape(-1)), mx.linalg.norm(replaced.reshape(-1))
    if (apart <= tolerance * norm).item():  # not for NaN
        return ""
    return f"its results differ by {apart.item():.2g} where their norm is {norm.item():.2g}"
