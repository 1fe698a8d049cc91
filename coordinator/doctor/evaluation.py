"""The cost of one evaluation, which every step pays however small the model is."""

from __future__ import annotations

import statistics
import time

import mlx.core as mx

from coordinator.doctor.finding import Finding, Verdict

SAMPLES = 50

SLOW_SECONDS = 1e-3
"""Seconds. Reports give 0.2 to 0.25 ms for Metal."""


def check_evaluation() -> Finding:
    """Measure the round trip between Python and MLX's device with the smallest computation."""
    one = mx.ones((8,))
    mx.eval(one)
    times = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        mx.eval(one + 1)
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times)
    slow = seconds > SLOW_SECONDS
    advice = "The device answers slowly. End other programs that use it." if slow else ""
    figure = f"{seconds * 1e3:.3f} ms"
    return Finding(
        "evaluation", Verdict.WARN if slow else Verdict.OK, figure, advice, {"seconds": seconds}
    )
