"""Checks of the device: the cost of an evaluation, kernels of this model's shapes, and the recurrence."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


WINDOW = 8
"""Rows of the widest window that is tried."""

LARGEST_MATRIX = 32 * 10**6
"""Elements. Larger matrices, above all lm_head, are tried with fewer outputs, which does not change the kernel."""

ROUNDS = 5
"""Rounds of a timing, whose median counts."""

COPIES = 4
"""Matrices that one timing reads, so that a cache does not hold them."""

Rows = Callable[[mx.array], mx.array]
"""A product of `[rows, inputs]` that treats each row alone."""


@dataclass(frozen=True)
class Product:
    """A matrix product of the model: its inputs, its outputs and how its weight is quantized."""

    name: str
    inputs: int
    outputs: int
    bits: int | None = None
    group: int = 64
    mode: str = "affine"

    def rows(self, dtype: mx.Dtype) -> Rows:
        """Return the product with a random weight of this shape."""
        weight = (mx.random.normal((self.outputs, self.inputs)) / self.inputs**0.5).astype(dtype)
        if self.bits is None:
            mx.eval(weight)
            return lambda x: x @ weight.T
        packed, scales, *biases = mx.quantize(
            weight, group_size=self.group, bits=self.bits, mode=self.mode
        )
        mx.eval(packed, scales, *biases)
        return lambda x: mx.quantized_matmul(
            x,
            packed,
            scales,
            biases[0] if biases else None,
            transpose=True,
            group_size=self.group,
            bits=self.bits,
            mode=self.mode,
        )


def products(config: ModelConfig) -> list[Product]:
    """Return the products of one layer and of lm_head."""
    text, hidden = config.text_config, config.hidden_size
    heads = int(text["num_attention_heads"])
    middle = int(text.get("intermediate_size") or text.get("moe_intermediate_size") or 2 * hidden)
    settings = config.quantization or {}
    bits = settings.get("bits")
    group, mode = int(settings.get("group_size", 64)), str(settings.get("mode", "affine"))
    shapes = {
        "attention": (hidden, heads * config.head_dim),
        "GDN": (hidden, config.gdn_conv_dim),
        "MLP up": (hidden, middle),
        "MLP down": (middle, hidden),
        "lm_head": (hidden, min(config.vocab_size, max(group, LARGEST_MATRIX // hidden))),
    }
    return [
        Product(name, inputs, outputs, bits, group, mode)
        for name, (inputs, outputs) in shapes.items()
        if bits is None or inputs % group == 0
    ]


def equal_rows(product: Rows, x: mx.array) -> int:
    """Return the widest window, up to the rows of `x`, in which every row equals the row computed alone.

    A window counts only if all narrower ones are equal too.
    """
    alone = [product(x[i : i + 1]) for i in range(x.shape[0])]
    mx.eval(alone)
    for width in range(2, x.shape[0] + 1):
        window = product(x[:width])
        pairs = [mx.array_equal(window[i : i + 1], alone[i]) for i in range(width)]
        if not all(bool(pair.item()) for pair in pairs):
            return width - 1
    return int(x.shape[0])


def equal_attention(config: ModelConfig, dtype: mx.Dtype, keys: int) -> int:
    """Return the widest window in which each query of attention over `keys` keys equals the query alone."""
    heads, dim = int(config.text_config["num_attention_heads"]), config.head_dim
    shape = (1, config.num_kv_heads, keys, dim)
    k, v = (mx.random.normal(shape).astype(dtype) for _ in range(2))
    q = mx.random.normal((1, heads, WINDOW, dim)).astype(dtype)
    attend = mx.fast.scaled_dot_product_attention
    for width in range(2, WINDOW + 1):
        start = keys - width
        window = attend(q[:, :, :width], k, v, scale=dim**-0.5, mask="causal")
        for i in range(width):
            end = start + i + 1
            own = slice(i, i + 1)
            alone = attend(q[:, :, own], k[:, :, :end], v[:, :, :end], scale=dim**-0.5)
            if not bool(mx.array_equal(alone, window[:, :, own]).item()):
                return width - 1
    return WINDOW


def check_exactness(config: ModelConfig, dtype: mx.Dtype, *, full: bool = False) -> Finding:
    """Report the widest window that gives the answers of decoding without drafts, bit for bit."""
    mx.random.seed(1)
    widths = {
        p.name: equal_rows(p.rows(dtype), mx.random.normal((WINDOW, p.inputs)).astype(dtype))
        for p in products(config)
    }
    for keys in (300, 1026, 1500, 4098, 8200) if full else (300, 1500):
        widths[f"attention over {keys} keys"] = equal_attention(config, dtype, keys)
    exact = min(widths.values())
    values: dict[str, Any] = {"exact": exact, "widths": widths, "dtype": str(dtype)}
    if exact == WINDOW:
        return judged("exactness", f"exact to windows of {WINDOW}", "", values)
    inexact = ", ".join(name for name, width in widths.items() if width == exact)
    figure = f"exact to windows of {exact}" if exact > 1 else "not exact in any window"
    advice = (
        f"Rows of wider windows round differently in: {inexact}. With drafts, and with concurrent requests, an "
        f"answer may differ where two tokens are nearly equally likely. Use --exact for equal answers; the check "
        f"'exact mode' has its price. --mtp {exact - 1 or 'off'} is enough for one request at a time."
    )
    return judged("exactness", figure, advice, values)


def interleaved_seconds(
    copies: Sequence[Rows], x: mx.array, sizes: Sequence[int]
) -> dict[int, float]:
    """Return the median seconds of all `copies` by number of rows. Rounds of all sizes alternate."""
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(ROUNDS + 1):
        for size in times:
            started = time.perf_counter()
            mx.eval([copy(x[:size]) for copy in copies])
            if turn:  # the first one also compiles and warms up
                times[size].append(time.perf_counter() - started)
    return {size: statistics.median(values) for size, values in times.items()}


def check_window_cost(config: ModelConfig, dtype: mx.Dtype) -> Finding:
    """Measure the time of the largest product over 1 to 8 rows, as multiples of the time over one row."""
    product = max(products(config), key=lambda p: p.inputs * p.outputs)
    copies = [product.rows(dtype) for _ in range(COPIES)]
    x = mx.random.normal((WINDOW, product.inputs)).astype(dtype)
    seconds = interleaved_seconds(copies, x, (1, 2, 3, 4, 5, 6, 8))
    ratios = {rows: value / seconds[1] for rows, value in seconds.items()}
    figure = ", ".join(f"{rows}: {ratio:.2f}" for rows, ratio in ratios.items())
    values = {"product": product.name, "ratios": ratios, "seconds": seconds[1] / COPIES}
    return judged("window cost", figure, "", values)
