"""Attention whose projections, norms and RoPE take few operations. In fp32 the bits are those of the reference."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import DecoderLayer
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from mtp.layers.joined.products import ColumnLinear, can_store_columns, scaled_rows
from mtp.layers.kv_cache import KVRows
from mtp.layers.layer import Hole
from mtp.layers.reference.attention import AttentionLayer, Projected
from mtp.layers.turns import turn, turn_table


def can_join_attention(attention: Qwen3NextAttention, *, widen: bool) -> bool:
    """Return whether `JoinedAttentionLayer` computes the layer."""
    rope = attention.rope
    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    return (
        can_store_columns(inputs, widen=widen)
        and can_store_columns([attention.o_proj], widen=widen)
        and type(rope) is nn.RoPE
        and not rope.traditional
        and attention.q_norm.eps == attention.k_norm.eps
    )


class JoinedAttention(nn.Module):
    """The products of an attention layer whose query, key, value and gate projections are one.

    Keys, values and queries have `dtype`, so that caches have the type of the checkpoint. The rest is fp32.
    """

    def __init__(self, attention: Qwen3NextAttention, dtype: mx.Dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.rope = attention.rope
        self.scale = attention.scale
        self.heads = attention.num_attention_heads
        self.kv_heads = attention.num_key_value_heads
        dim = attention.head_dim
        q, gates = _without_gates(attention.q_proj, self.heads, dim)
        self.inputs = ColumnLinear.from_modules([q, attention.k_proj, attention.v_proj, gates])
        self.o_proj = ColumnLinear.from_modules([attention.o_proj])
        norms = [attention.q_norm.weight] * self.heads + [attention.k_norm.weight] * self.kv_heads
        self._scales = mx.stack(norms).astype(mx.float32)
        self._eps = attention.q_norm.eps
        turned = self.heads + self.kv_heads
        self._ends = [turned * dim, (turned + self.kv_heads) * dim]
        self._dim = dim
        mx.eval(self._scales)
        del attention.q_proj.weight

    def project(
        self, x: mx.array, turns: mx.array
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return queries, keys, values `[rows, heads, dim]` and gates `[rows, heads * dim]` of `x [rows, hidden]`.

        Queries and keys are normalized and turned. `turns` are those of the rows, from `turns_of`.
        """
        y = self.inputs(x)
        first, second = self._ends
        rows = x.shape[0]
        qk = scaled_rows(y[:, :first].reshape(rows, -1, self._dim), self._scales, self._eps)
        qk = turn(qk, turns).astype(self.dtype)
        values = y[:, first:second].reshape(rows, -1, self._dim).astype(self.dtype)
        return qk[:, : self.heads], qk[:, self.heads :], values, y[:, second:]


class JoinedAttentionLayer(AttentionLayer):
    """An attention layer whose projections are one. RoPE turns all rows of a frame at once."""

    kind = "joined"

    def __init__(self, layer: DecoderLayer, dtype: mx.Dtype) -> None:
        super().__init__(layer)
        self.attention = JoinedAttention(layer.self_attn, dtype)

    def _project(
        self, x: mx.array, caches: Sequence[KVRows], widths: Sequence[int], holes: Sequence[Hole]
    ) -> Projected:
        """Return the projections of the norm of `x [rows, hidden]`, queries and keys normalized and turned."""
        moved = mx.concatenate([hole.count for hole in holes]) if holes else None
        projected: Projected = self.attention.project(
            self.norm(x), turns_of(self.attention.rope, caches, widths, moved)
        )
        return projected

    def _turned(
        self, q: mx.array, k: mx.array, caches: Sequence[KVRows], holes: Sequence[Hole]
    ) -> tuple[mx.array, mx.array]:
        """Return `q` and `k`, which are turned already."""
        return q, k


def _without_gates(projection: nn.Linear, heads: int, dim: int) -> tuple[nn.Linear, nn.Linear]:
    """Return the projections of the queries and of the gates, which alternate head by head in `projection`."""
    parts = []
    for half in range(2):
        part = nn.Linear(1, 1, bias=False)
        part.weight = projection.weight.reshape(heads, 2, dim, -1)[:, half].reshape(heads * dim, -1)
        if "bias" in projection:
            part.bias = projection.bias.reshape(heads, 2, dim)[:, half].reshape(-1)
        parts.append(part)
    return parts[0], parts[1]


def turns_of(
    rope: nn.RoPE, caches: Sequence[KVRows], widths: Sequence[int], moved: mx.array | None = None
) -> mx.array:
    """Return cosines and sines of rows, where sequence i owns `widths[i]` rows after those in `caches[i]`.

    With `moved`, int32 `[n]`, every sequence has one row, and row i is `moved[i]` positions earlier. Returns fp32
    `[rows, 2, half]`.
    """
    starts = [cache.position for cache in caches]
    end = max(start + width for start, width in zip(starts, widths, strict=True))
    table = turn_table(rope, end)
    if moved is not None:
        return table[mx.array(starts, dtype=mx.int32) - moved]
    parts = []
    for cache, start, width in zip(caches, starts, widths, strict=True):
        image = cache.image_turns(rope, width)
        parts.append(table[start : start + width] if image is None else image)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
