"""GatedDeltaNet over flat rows: many sequences in one pass, each with its own state.

The module and its weights are mlx-lm's (`qwen3_5.GatedDeltaNet`); the forward is ours because it runs rows of
several sequences at once and records the tape of each open window.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from worker.cache.gdn import GDNCache, Tape


def mix(
    layer: GatedDeltaNet,
    x: mx.array,
    caches: Sequence[GDNCache],
    widths: Sequence[int],
    taped: Sequence[bool],
) -> mx.array:
    """GDN of `x` `[rows, hidden]`, where sequence i owns the next `widths[i]` rows. Returns `[rows, hidden]`.

    Advances each cache, and leaves a tape on those whose window is open (`taped`).
    """
    inputs = layer.in_proj_qkv(x), layer.in_proj_a(x), layer.in_proj_b(x)
    z = layer.in_proj_z(x).reshape(-1, layer.num_v_heads, layer.head_v_dim)
    outputs = []
    start = 0
    for cache, width, keep in zip(caches, widths, taped, strict=True):
        qkv, a, b = (t[None, start : start + width] for t in inputs)
        if keep and not all(taped):
            # Beside prompt chunks a tape of views would keep the chunks' rows alive while its window is open.
            qkv, a, b = mx.contiguous(qkv), mx.contiguous(a), mx.contiguous(b)
        outputs.append(_advance(cache, qkv, a, b, keep)[0])
        start += width
    out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    out = layer.norm(out, z)
    return layer.out_proj(out.reshape(x.shape[0], -1))


def _advance(cache: GDNCache, qkv: mx.array, a: mx.array, b: mx.array, keep: bool) -> mx.array:
    """Advance one sequence over `[1, w, …]` inputs; returns its outputs `[1, w, v_heads, v_dim]`."""
    layer = cache.layer
    width = qkv.shape[1]
    conv_input = mx.concatenate([cache.conv, qkv], axis=1)
    conv_out = nn.silu(layer.conv1d(conv_input))
    q, k, v = mx.split(conv_out, [layer.key_dim, 2 * layer.key_dim], axis=-1)
    q = q.reshape(1, width, layer.num_k_heads, layer.head_k_dim)
    k = k.reshape(1, width, layer.num_k_heads, layer.head_k_dim)
    v = v.reshape(1, width, layer.num_v_heads, layer.head_v_dim)
    q, k = normalize_qk(q, k, inv_scale=layer.head_k_dim**-0.5, eps=1e-6)
    if keep:
        cache.tapes.append(Tape(cache.conv, cache.state, qkv, k, v, a, b))
    # A contiguous copy: a view would keep the whole chunk's inputs alive for three rows of it.
    cache.conv = mx.contiguous(conv_input[:, width:])
    out, cache.state = gated_delta_update(q, k, v, a, b, layer.A_log, layer.dt_bias, cache.state)
    return out
