"""Checks of the device: the cost of an evaluation, and the kernel of the recurrence."""

from __future__ import annotations

import statistics
import time

import mlx.core as mx
from mlx_lm.models import gated_delta

from coordinator.doctor.finding import Finding, Verdict, judged
from mtp.checkpoint.format.config import ModelConfig

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
    return judged("evaluation", figure, advice, {"seconds": seconds})


TOLERANCE = 2e-2
"""Largest difference between kernel and reference in bfloat16, over outputs of about 1."""

GDN_WINDOW, CUT = 5, 3
"""Tokens of a window of the recurrence, and accepted tokens of it in the replay."""

State = tuple[mx.array, mx.array]


def check_gdn(config: ModelConfig, dtype: mx.Dtype) -> Finding:
    """Report a GDN kernel that differs from its reference, between widths, or in a replay."""
    mx.random.seed(2)
    inputs = _inputs(config, dtype)
    output, state = _run(inputs, slice(0, GDN_WINDOW))
    reference, reference_state = _run(inputs, slice(0, GDN_WINDOW), use_kernel=False)
    difference = max(_difference(output, reference), _difference(state, reference_state))
    steps = inputs[-1]
    outputs = []
    for i in range(GDN_WINDOW):
        one, steps = _run((*inputs[:-1], steps), slice(i, i + 1))
        outputs.append(one)
    windows = bool(mx.array_equal(mx.concatenate(outputs, axis=1), output).item()) and bool(
        mx.array_equal(steps, state).item()
    )
    short = inputs[-1]
    for i in range(CUT):
        _, short = _run((*inputs[:-1], short), slice(i, i + 1))
    _, replayed = _run(inputs, slice(0, CUT))
    replay = bool(mx.array_equal(short, replayed).item())
    values = {"difference": difference, "windows_equal": windows, "replay_equal": replay}
    figure = f"differs by {difference:.1e} from the reference"
    if not difference < TOLERANCE:
        advice = (
            "mlx-lm's kernel computes garbage here. Install the pinned versions of mlx and mlx-lm."
        )
        return Finding("GDN", Verdict.FAIL, figure, advice, values)
    if not (windows and replay):
        advice = "A window is not equal to its single steps, so drafts may change an answer. Use --mtp off."
        return judged("GDN", figure, advice, values)
    return judged("GDN", f"{figure}, equal in windows and after a rejection", "", values)


def _inputs(config: ModelConfig, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    """Return random q, k, v, a, b, A_log, dt_bias and state with the model's heads."""
    key_heads, value_heads = config.gdn_key_heads, config.gdn_value_heads
    keys = (1, GDN_WINDOW, key_heads, config.gdn_key_dim)
    values = (1, GDN_WINDOW, value_heads, config.gdn_value_dim)
    q, k = ((mx.random.normal(keys) * 0.1).astype(dtype) for _ in range(2))
    v = mx.random.normal(values).astype(dtype)
    a, b = (mx.random.normal((1, GDN_WINDOW, value_heads)).astype(dtype) for _ in range(2))
    state = mx.random.normal((1, value_heads, config.gdn_value_dim, config.gdn_key_dim)) * 0.1
    return q, k, v, a, b, mx.zeros(value_heads), mx.ones(value_heads), state


def _run(inputs: tuple[mx.array, ...], steps: slice, *, use_kernel: bool = True) -> State:
    q, k, v, a, b = (x[:, steps] for x in inputs[:5])
    a_log, dt_bias, state = inputs[5:]
    output, new = gated_delta.gated_delta_update(
        q, k, v, a, b, a_log, dt_bias, state, use_kernel=use_kernel
    )
    mx.eval(output, new)
    return output, new


def _difference(a: mx.array, b: mx.array) -> float:
    largest = mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()
    assert isinstance(largest, float)
    return largest
