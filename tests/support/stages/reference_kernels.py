"""The CUDA kernels in MLX's own operations, so that the layers around them run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mtp.device import DEVICES
from mtp.layers.cuda.packed_linear import GROUP, TILE
from mtp.layers.cuda.row_attention import RowArrays
from mtp.layers.gdn_windows import HEAD_DIM as GDN_DIM
from mtp.layers.gdn_windows import TAPS, GatedDeltaShape
from mtp.layers.prepare_rows import HEAD_DIM, AttentionShape


def unpack(w: mx.array, factors: mx.array, dtype: mx.Dtype, rows: mx.array | None = None) -> mx.array:
    """Return the weights `[N, K]`, or the outputs that `rows` names."""
    tiles, chunks = w.shape[:2]
    words = w.reshape(tiles, chunks, 8, 4, 2, 2).transpose(0, 4, 2, 1, 3, 5)
    both = factors.reshape(tiles, chunks, 8, 2).transpose(0, 3, 2, 1)
    pairs = mx.contiguous(both).view(dtype).reshape(tiles * TILE, chunks, 2)
    weights = mx.dequantize(
        mx.contiguous(words).reshape(tiles * TILE, chunks * 8),
        mx.contiguous(pairs[..., 0]),
        mx.contiguous(pairs[..., 1]),
        group_size=GROUP,
        bits=4,
    )
    return weights if rows is None else weights[rows]


def multiply_rows(
    x: mx.array,
    w: mx.array,
    factors: mx.array,
    *,
    swiglu: bool = False,
    residual: mx.array | None = None,
) -> mx.array:
    """Return `x` times the packed weights, computed in fp32 and row by row."""
    weights = unpack(w, factors, x.dtype).astype(mx.float32)
    y = mx.concatenate([x[i : i + 1].astype(mx.float32) @ weights.T for i in range(x.shape[0])])
    if swiglu:
        gate, up = mx.split(y, 2, axis=-1)
        y = nn.silu(gate) * up
    if residual is not None:
        y = y + residual
    return y.astype(x.dtype)


def gated_delta_window(
    shape: GatedDeltaShape,
    rows: mx.array,
    past: mx.array,
    conv: mx.array,
    state: mx.array,
    spans: mx.array,
    constants: tuple[mx.array, ...],
) -> tuple[mx.array, mx.array, mx.array]:
    """Run spans token by token in fp32."""
    out = mx.zeros((rows.shape[0], shape.value_heads * GDN_DIM), rows.dtype)
    convs, states = [], []
    for slot, past_start, past_count, start, count, saved_after in cast(list[list[int]], spans.tolist()):
        tokens = mx.concatenate([past[past_start : past_start + past_count], rows[start : start + count]])
        held, inputs = state[slot], conv[slot]
        for index in range(past_count + count + 1):
            if index == saved_after:
                convs.append(inputs)
                states.append(held)
            if index == past_count + count:
                break
            token = tokens[index : index + 1]
            window = mx.concatenate([inputs, token[:, : shape.channels]])
            y, held = _step(shape, window, token, held, constants)
            inputs = window[1:]
            if index >= past_count:
                out[start + index - past_count] = y.astype(rows.dtype)
    return out, mx.stack(convs), mx.stack(states)


def _step(
    shape: GatedDeltaShape,
    window: mx.array,
    token: mx.array,
    state: mx.array,
    constants: tuple[mx.array, ...],
) -> tuple[mx.array, mx.array]:
    """Return one token's output and the state after it."""
    conv_w, a_log, dt_bias, norm_w, (eps, bound) = (c.astype(mx.float32) for c in constants)
    keys, heads = shape.key_heads, shape.value_heads
    assert window.shape[0] == TAPS
    mixed = nn.silu((window.astype(mx.float32) * conv_w.T).sum(axis=0)).reshape(-1, GDN_DIM)
    q, k, v = mixed[:keys], mixed[keys : 2 * keys], mixed[2 * keys :]
    q, k = (t * mx.rsqrt((t * t).sum(axis=-1, keepdims=True) + 1e-6) for t in (q, k))
    q, k = (mx.repeat(t, heads // keys, axis=0) for t in (q * GDN_DIM**-0.5, k))
    rest = token[0, shape.channels : shape.row].astype(mx.float32)
    z, b, a = mx.split(rest, [heads * GDN_DIM, heads * GDN_DIM + heads])
    rate, a = mx.exp(a_log)[:, None], (a + dt_bias).reshape(heads, shape.decays)
    log = bound * mx.sigmoid(rate * a) if bound.item() else -rate * nn.softplus(a)
    decay = mx.exp(log)[:, None]
    state = state * decay
    delta = (v - (state * k[:, None]).sum(axis=-1)) * mx.sigmoid(b)[:, None]
    state = state + k[:, None] * delta[..., None]
    y = (state * q[:, None]).sum(axis=-1)
    y = y * mx.rsqrt((y * y).mean(axis=-1, keepdims=True) + eps) * norm_w
    gate = nn.silu if shape.silu else mx.sigmoid
    return (y * gate(z.reshape(heads, GDN_DIM))).reshape(-1), state


def prepare_rows(
    shape: AttentionShape, x: mx.array, places: mx.array, constants: tuple[mx.array, ...]
) -> tuple[mx.array, mx.array]:
    """Return q, and k and v, normed and rotated."""
    q_norm, k_norm, frequencies, eps = constants
    rows, heads, kv = x.shape[0], shape.query_heads, shape.kv_heads
    both = x[:, : 2 * heads * HEAD_DIM].reshape(rows, heads, 2 * HEAD_DIM)
    rest = x[:, 2 * heads * HEAD_DIM :].reshape(rows, 2 * kv, HEAD_DIM)
    angles = places[:, 1:2].astype(mx.float32) * frequencies
    q = _rotated(both[..., :HEAD_DIM], q_norm, angles, eps)
    k = _rotated(rest[:, :kv], k_norm, angles, eps)
    k, v = (t.transpose(1, 0, 2) for t in (k, rest[:, kv:]))
    return q.astype(x.dtype), mx.stack([k.astype(x.dtype), v])


def _rotated(t: mx.array, weight: mx.array, angles: mx.array, eps: mx.array) -> mx.array:
    t = t.astype(mx.float32)
    t = t * mx.rsqrt((t * t).mean(axis=-1, keepdims=True) + eps) * weight.astype(mx.float32)
    half = angles.shape[1]
    cosine, sine = mx.cos(angles)[:, None], mx.sin(angles)[:, None]
    a, b, rest = mx.split(t, [half, 2 * half], axis=-1)
    return mx.concatenate([a * cosine - b * sine, a * sine + b * cosine, rest], axis=-1)


def attend_rows(
    shape: AttentionShape,
    q: mx.array,
    x: mx.array,
    rows: RowArrays,
    scale: mx.array,
    pairs: Sequence[mx.array],
) -> mx.array:
    """Attend row by row in fp32."""
    outputs = []
    group = shape.query_heads // shape.kv_heads
    spans = cast(list[list[int]], rows.spans.tolist())
    for row, (last, hole, hole_end) in enumerate(spans):
        slot = cast(int, rows.places[row, 0].item())
        assert rows.caps[slot].item() == pairs[slot].shape[2]
        seen = mx.array([i for i in range(last + 1) if not hole <= i < hole_end])
        k, v = mx.repeat(pairs[slot][:, :, seen].astype(mx.float32), group, axis=1)
        scores = mx.softmax((k * (q[row].astype(mx.float32) * scale)[:, None]).sum(-1), axis=-1)
        y = (scores[..., None] * v).sum(axis=1)
        gates = x[row, : 2 * shape.query_heads * HEAD_DIM].reshape(-1, 2 * HEAD_DIM)
        y = y * mx.sigmoid(gates[:, HEAD_DIM:].astype(mx.float32))
        outputs.append(y.reshape(1, -1).astype(q.dtype))
    return mx.concatenate(outputs)


def write_rows(new: mx.array, rows: RowArrays, pairs: Sequence[mx.array], before: Sequence[mx.array]) -> mx.array:
    """Write into the memory of `pairs` at once."""
    mx.eval(new, *pairs, *before)
    words = np.array(new.view(mx.uint8))
    spans = cast(list[list[int]], rows.spans.tolist())
    for row, (place, _, _) in enumerate(spans):
        pair = pairs[cast(int, rows.places[row, 0].item())]
        np.array(pair.view(mx.uint8), copy=False)[:, :, place] = words[:, :, row]
    return mx.array([1], mx.int32)


REPLACED = {
    "packed_linear": (multiply_rows, unpack),
    "attention": (prepare_rows, write_rows, attend_rows),
    "pack": (multiply_rows, gated_delta_window),
}


@contextmanager
def reference_kernels() -> Iterator[None]:
    """Pack stages on the CPU and run these functions for the kernels inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        for module, functions in REPLACED.items():
            for function in functions:
                patch.setattr(f"mtp.layers.cuda.{module}.{function.__name__}", function)
        for module in ("worker.model.layer_variants", "worker.model.stage"):
            patch.setattr(f"{module}.this_device", lambda: DEVICES["cuda"])
        mx.disable_compile()  # the functions above read their arguments
        try:
            yield
        finally:
            mx.enable_compile()
