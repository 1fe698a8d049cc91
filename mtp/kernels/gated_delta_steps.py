"""The recurrence of a GatedDeltaNet layer over tokens, for backends without a kernel of this project."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update

from mtp.kernels.cuda import backend


def advance_state(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Advance `state [n, v_heads, v_dim, k_dim]` over `w` tokens. Return the outputs `[n, w, v_heads, v_dim]` and it.

    `q` and `k` are `[n, w, k_heads, k_dim]` after `normalize_qk`, `v` is `[n, w, v_heads, v_dim]`, `a` and `b` are
    `[n, w, v_heads]`. On the CPU this takes fewer operations than mlx-lm's function, with the same arithmetic.
    """
    if backend() != "cpu":
        found: tuple[mx.array, mx.array] = gated_delta_update(q, k, v, a, b, a_log, dt_bias, state)
        return found
    if q.shape[1] == 1:
        q, k, v, a, b = (x.squeeze(1) for x in (q, k, v, a, b))
        y, state = _step(q, k, v, a, b, a_log, dt_bias, state)
        return y[:, None], state
    outputs = []
    for t in range(q.shape[1]):
        y, state = _step(q[:, t], k[:, t], v[:, t], a[:, t], b[:, t], a_log, dt_bias, state)
        outputs.append(y)
    return mx.stack(outputs, axis=1), state


@mx.compile
def _step(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Advance the state over one token. A key head serves several value heads without being copied."""
    count, heads, values, keys = state.shape
    shared = (count, q.shape[1], heads // q.shape[1])
    decay = mx.exp(-mx.exp(a_log.astype(mx.float32)) * nn.softplus(a + dt_bias))
    q, k = q[:, :, None, None], k[:, :, None, None]
    wide = state.reshape(*shared, values, keys) * decay.reshape(*shared, 1, 1)
    memory = (wide * k).sum(axis=-1)
    delta = (v.reshape(*shared, values) - memory) * mx.sigmoid(b).reshape(*shared, 1)
    wide = wide + k * delta[..., None]
    y = (wide * q).sum(axis=-1)
    return y.reshape(count, heads, values).astype(q.dtype), wide.reshape(state.shape)
