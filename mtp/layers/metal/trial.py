"""The trial of a kernel: a layer with it beside the same layer without it, their results and their times.

Both compute the same rows at the shapes of the model, on the machine that will serve. Which of them is faster there is
unknown before.
"""

from __future__ import annotations

import statistics
import time

import mlx.core as mx

from mtp.layers.layer import KernelTrial, KVFormat, Layer, Mixer, Rows

BATCHES = ((1, 1), (1, 4), (8, 1))
"""Sequences and tokens of each. They are those of plain decoding, of drafts and of several clients."""

STEPS = 8
"""Steps of one evaluation. Each needs the rows and the states of the one before, as in an answer."""

ROUNDS = 7
"""Evaluations of each batch with each layer, in turn. Their medians count."""

TRIAL_SECONDS = 2.0
"""Seconds of a trial after which no further round begins. More than ROUNDS follow while noise hides which layer is
faster, as on a machine that is busy at the start. A model has up to three trials."""

INPUT = 0.03
"""Root mean square of the rows. Against larger ones, what a layer adds would be lost in their rounding."""

TOLERANCE = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 1e-1}
"""Largest norm of the difference over the norm of the result. Both round to `dtype` at different places."""


class MixerTrial:
    """A mixer that is tried as a layer."""

    def __init__(self, mixer: Mixer) -> None:
        self.new_cache = mixer.new_cache
        self.add = lambda x, *rest: x + mixer.mix(x, *rest)


class RowsTrial:
    """A function of rows that is tried as a layer."""

    def __init__(self, rows: Rows) -> None:
        self.new_cache = lambda _: None
        self.add = lambda x, *_: x + rows(x)


Tried = Layer | MixerTrial | RowsTrial


def try_layer(own: Tried, replaced: Tried, hidden: int, dtype: mx.Dtype) -> KernelTrial:
    """Return the trial of the kernel that `own` has and `replaced` has not, for rows `[…, hidden]` of `dtype`."""
    due, rounds = time.monotonic() + TRIAL_SECONDS, list[tuple[float, float]]()
    try:
        batches = list[tuple[mx.array, int]]()
        for sequences, tokens in BATCHES:
            x = mx.random.normal((sequences * tokens, hidden), scale=INPUT, key=mx.random.key(5))
            batches.append((x.astype(dtype), sequences))
            found, expected = (_added(layer, *batches[-1], 2) for layer in (own, replaced))
            if problem := _difference(found, expected, TOLERANCE[dtype]):
                return KernelTrial(problem=problem)
        while not rounds or (_is_open(rounds) and time.monotonic() < due):
            first, second = (own, replaced) if len(rounds) % 2 else (replaced, own)
            times = {id(first): 0.0, id(second): 0.0}
            for x, sequences in batches:
                for layer in (first, second):
                    began = time.perf_counter()
                    mx.eval(_added(layer, x, sequences, STEPS))
                    times[id(layer)] += time.perf_counter() - began
            rounds.append((times[id(own)] / STEPS, times[id(replaced)] / STEPS))
    except Exception as error:  # whatever the compiler of a machine finds wrong
        return KernelTrial(problem=str(error)[:300])
    return KernelTrial(*(statistics.median(side) for side in zip(*rounds, strict=True)))


def _is_open(rounds: list[tuple[float, float]]) -> bool:
    """Return whether there are fewer than ROUNDS, or neither side was faster in three quarters of them."""
    won = sum(mine <= other for mine, other in rounds) / len(rounds)
    return len(rounds) < ROUNDS or 0.25 < won < 0.75


def _added(layer: Tried, x: mx.array, sequences: int, steps: int) -> mx.array:
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
