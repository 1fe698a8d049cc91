"""Gated full attention over flat rows: many sequences in one pass, each with its own cache and length.

The projections process all rows at once. RoPE processes neighbouring sequences of equal width at once. The K/V cache
and the attention itself are per sequence. The modules and their weights are mlx-lm's own (`Qwen3NextAttention`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer

from mtp.layers.exact import ExactProducts
from mtp.layers.kv_cache import KVRows, new_kv
from mtp.layers.layer import MLP, REFERENCE, Hole, KVFormat, Layer, PlainMLP
from mtp.layers.rope import rotate

Projected = tuple[mx.array, mx.array, mx.array, mx.array]
"""Queries, keys and values `[rows, heads, dim]`, and the gates `[rows, …]`."""


class AttentionLayer(Layer):
    """An attention layer that runs the modules of mlx-lm."""

    kind = REFERENCE
    _queries: int | None = None
    windows: Collection[int] = ()
    """Widths of windows that the kernel for them attends faster. See `takes_window`."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.module = layer
        self.norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.attention: Any = layer.self_attn
        self.dtype = layer.input_layernorm.weight.dtype
        self.mlp: MLP = PlainMLP(layer.mlp)
        self._slices: int = getattr(layer.self_attn, "slices", 1)

    def new_cache(self, kv_format: KVFormat) -> KVRows:
        return new_kv(kv_format).with_rows(self.attention.num_key_value_heads, self.attention.head_dim)

    def pin_exact(self, products: ExactProducts) -> None:
        products.replace_children(self.attention)
        self.mlp.pin_exact(products)
        self._queries = products.queries

    def forward(
        self,
        x: mx.array,
        caches: Sequence[KVRows],
        widths: Sequence[int],
        stay_open: Sequence[bool] = (),
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        q_rows, keys, values, gate = self._project(x, caches, widths, holes)
        merged = self._attend(q_rows, keys, values, caches, widths, holes)
        return self._finish(x, merged, gate)

    def _finish(self, x: mx.array, merged: mx.array, gate: mx.array) -> mx.array:
        """Return `x [rows, hidden]` plus the projection of `merged`, gated, and then plus the MLP."""
        gated = merged * mx.sigmoid(gate.reshape(x.shape[0], -1))
        attended = self.communicator.sum(self.attention.o_proj(gated))
        return self.mlp.add_output(x + attended, self.mlp_norm)

    def _attend(
        self,
        q_rows: mx.array,
        keys: mx.array,
        values: mx.array,
        caches: Sequence[KVRows],
        widths: Sequence[int],
        holes: Sequence[Hole],
    ) -> mx.array:
        """Return the attention of projected rows `[rows, heads * dim]`, and append to each cache."""
        scale = self.attention.scale
        outputs: list[mx.array] = []
        for group, (q, k, v) in self._groups((q_rows, keys, values), caches, widths):
            q, k = self._rotated(q, k, group, holes)
            for i, cache in enumerate(group):
                new = q[i : i + 1], k[i : i + 1], v[i : i + 1]
                if holes:
                    out = cache.attend_around(*new, scale, holes[i])
                else:
                    out = cache.attend(*new, scale, self._queries, self._slices, self.windows)
                outputs.append(out.transpose(0, 2, 1, 3).reshape(out.shape[2], -1))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _groups(
        self, parts: Sequence[mx.array], caches: Sequence[Any], widths: Sequence[int]
    ) -> Iterator[tuple[Sequence[Any], list[mx.array]]]:
        """Yield the caches of neighbouring sequences of equal width, with their rows of `parts [rows, heads, dim]`.

        Those rows are `[n, heads, width, dim]`. With a bound on the queries every sequence is a group, as RoPE takes
        one at a time too.
        """
        runs = [[w] for w in widths] if self._queries else [list(e) for _, e in groupby(widths)]
        first = start = 0
        for width, count in ((run[0], len(run)) for run in runs):
            own = slice(start, start + width * count)
            shape = count, width
            found = [t[own].reshape(*shape, *t.shape[1:]).transpose(0, 2, 1, 3) for t in parts]
            yield caches[first : first + count], found
            first, start = first + count, own.stop

    def _project(
        self, x: mx.array, caches: Sequence[KVRows], widths: Sequence[int], holes: Sequence[Hole]
    ) -> Projected:
        """Return the projections of the norm of `x [rows, hidden]`, queries and keys normalized."""
        attention, rows, x = self.attention, x.shape[0], self.norm(x)
        q_rows, gate = mx.split(attention.q_proj(x).reshape(rows, attention.num_attention_heads, -1), 2, axis=-1)
        kv_shape = (rows, attention.num_key_value_heads, -1)
        keys = attention.k_norm(attention.k_proj(x).reshape(kv_shape))
        return attention.q_norm(q_rows), keys, attention.v_proj(x).reshape(kv_shape), gate

    def _rotated(
        self, q: mx.array, k: mx.array, caches: Sequence[KVRows], holes: Sequence[Hole]
    ) -> tuple[mx.array, mx.array]:
        """Return `q` and `k [n, heads, width, dim]` after RoPE, sequence i after the rows in `caches[i]`.

        With `holes` they have the positions without these.
        """
        rope = self.attention.rope
        images = [cache.image_rotations(rope, q.shape[2]) for cache in caches]
        if any(rotations is not None for rotations in images):
            return self._rotated_apart(q, k, caches, images)
        if len(caches) == 1 and not holes:
            position = caches[0].position
            return rope(q, offset=position), rope(k, offset=position)
        starts = mx.array([cache.position for cache in caches], dtype=mx.int32)
        if holes:
            starts = starts - mx.concatenate([hole.count for hole in holes])
        return rope(q, offset=starts), rope(k, offset=starts)

    def _rotated_apart(
        self, q: mx.array, k: mx.array, caches: Sequence[KVRows], images: Sequence[mx.array | None]
    ) -> tuple[mx.array, mx.array]:
        """Return what `_rotated` does, sequence by sequence. Some have rows of images."""
        parts = []
        for i, (cache, rotations) in enumerate(zip(caches, images, strict=True)):
            one = slice(i, i + 1)
            if rotations is None:
                parts.append(self._rotated(q[one], k[one], [cache], ()))
            else:
                parts.append((_rotated_heads(q[one], rotations), _rotated_heads(k[one], rotations)))
        return mx.concatenate([q for q, _ in parts]), mx.concatenate([k for _, k in parts])


def _rotated_heads(x: mx.array, rotations: mx.array) -> mx.array:
    """Return `x [1, heads, width, dim]` after RoPE by `rotations [width, 2, half]`."""
    return rotate(x[0].transpose(1, 0, 2), rotations).transpose(1, 0, 2)[None]
