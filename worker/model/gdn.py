"""GatedDeltaNet over flat rows: many sequences in one pass, each with its own state.

The module and its weights are mlx-lm's (`qwen3_5.GatedDeltaNet`). This project has its own forward pass, which runs
rows of several sequences at once and records the tape of each open window.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import normalize_qk
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from mtp.kernels.gated_delta_steps import advance_state
from worker.cache.gdn_cache import GDNCache, Tape
from worker.model.joined_gdn import JoinedGDN


def mix(
    layer: GatedDeltaNet | JoinedGDN,
    x: mx.array,
    caches: Sequence[GDNCache],
    widths: Sequence[int],
    taped: Sequence[bool],
    *,
    together: bool = True,
) -> mx.array:
    """Return the GDN of `x [rows, hidden]`, where sequence i owns the next `widths[i]` rows: `[rows, hidden]`.

    Advances each cache, and appends a tape to those whose window is open (`taped`). Neighbours of equal width run
    `together`, or each sequence alone.
    """
    if isinstance(layer, JoinedGDN):
        qkv, z, b, a = layer.project(x)
    else:
        qkv, z, b, a = (
            layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)
        )  # fmt: skip
    net = net_of(layer)
    inputs = qkv, a, b
    outputs = []
    start = 0
    every = list(zip(caches, widths, taped, strict=True))
    groups = [list(group) for _, group in groupby(every, key=lambda row: row[1])]
    for rows in groups if together else [[row] for row in every]:
        width = rows[0][1]
        end = start + width * len(rows)
        qkv, a, b = (t[start:end].reshape(len(rows), width, -1) for t in inputs)
        keep = [row[2] for row in rows]
        if any(keep) and not all(taped):
            # In a frame with prompt chunks, a tape of views would keep the rows of the chunks in memory.
            qkv, a, b = mx.contiguous(qkv), mx.contiguous(a), mx.contiguous(b)
        out = _advance(layer, [row[0] for row in rows], qkv, a, b, keep)
        outputs.append(out.reshape(-1, net.num_v_heads, net.head_v_dim))
        start = end
    out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    if isinstance(layer, JoinedGDN):
        return layer.finish(out, z, x.dtype)
    y: mx.array = net.out_proj(net.norm(out, z.reshape(out.shape)).reshape(x.shape[0], -1))
    return y


def net_of(layer: GatedDeltaNet | JoinedGDN) -> GatedDeltaNet:
    """Return the module of mlx-lm, which has the sizes and the gates of the layer."""
    return layer.net if isinstance(layer, JoinedGDN) else layer


def _advance(
    layer: GatedDeltaNet | JoinedGDN,
    caches: Sequence[GDNCache],
    qkv: mx.array,
    a: mx.array,
    b: mx.array,
    keep: Sequence[bool],
) -> mx.array:
    """Advance n sequences over `[n, w, …]` inputs. Returns their outputs `[n, w, v_heads, v_dim]`."""
    count, width = qkv.shape[:2]
    held = _joined([c.conv for c in caches])
    qkv = qkv.astype(held.dtype)
    conv_input = mx.concatenate([held, qkv], axis=1)
    q, k, v = (
        layer.convolve(conv_input)
        if isinstance(layer, JoinedGDN)
        else _convolved(layer, conv_input)
    )
    net = net_of(layer)
    before = _joined([c.state for c in caches])
    out, state = advance_state(q, k, v, a, b, net.A_log, net.dt_bias, before)
    # A contiguous copy, since a view of three rows would keep the inputs of the whole chunk in memory.
    conv = mx.contiguous(conv_input[:, width:])
    for i, cache in enumerate(caches):
        own = slice(i, i + 1)
        if keep[i]:
            rows = (t[own] for t in (qkv, k, v, a, b))
            cache.tapes.append(Tape(cache.conv, cache.state, *rows))
        cache.conv, cache.state = (conv, state) if count == 1 else (conv[own], state[own])
    return out


def _convolved(layer: GatedDeltaNet, conv_input: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return q, k and v `[n, w, heads, dim]` of `conv_input [n, w + 3, channels]`, q and k normalized."""
    conv_out = nn.silu(layer.conv1d(conv_input))
    q, k, v = mx.split(conv_out, [layer.key_dim, 2 * layer.key_dim], axis=-1)
    rows = conv_out.shape[:2]
    q = q.reshape(*rows, layer.num_k_heads, layer.head_k_dim)
    k = k.reshape(*rows, layer.num_k_heads, layer.head_k_dim)
    v = v.reshape(*rows, layer.num_v_heads, layer.head_v_dim)
    q, k = normalize_qk(q, k, inv_scale=layer.head_k_dim**-0.5, eps=1e-6)
    return q, k, v


def _joined(states: Sequence[mx.array]) -> mx.array:
    """Return the states `[1, …]` of n sequences as one `[n, …]`."""
    return states[0] if len(states) == 1 else mx.concatenate(list(states))
