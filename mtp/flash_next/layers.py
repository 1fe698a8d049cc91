"""The layers of Flash-Next and their states: streams around GatedDeltaNet or sparse attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mtp.flash_next import modules
from mtp.flash_next.ngrams import Ints
from mtp.layers.experts import fuse_experts
from mtp.layers.layer import CutAxis, Hole, KVFormat, LayerCache, Mixer, checked_state
from mtp.layers.linear import FusedLinear, side_by_side
from mtp.layers.reference.attention import AttentionLayer
from mtp.layers.reference.gdn import GatedDelta
from mtp.layers.rope import image_rotations, rotate, rotation_table
from mtp.layers.sparse_attention import BlockReader, IndexedKV, SparseReads, full_attention, sparse_attention
from mtp.layers.stream_layer import StreamLayer
from proto.errors import ProtocolError
from proto.images import ImageLayout


@dataclass(frozen=True)
class _NgramTape:
    """The state before a window, and its tokens and rows of the convolution."""

    context_before: Ints
    rows_before: mx.array
    tokens: Ints
    rows: mx.array


@dataclass
class NgramState:
    """The last tokens and the last rows `[1, n, width]` of the convolution of a PLE, with tapes of open windows."""

    context: Ints
    rows: mx.array
    tapes: list[_NgramTape] = field(default_factory=list)

    @classmethod
    def empty(cls, ple: modules.PerLayerEmbedding, dtype: mx.Dtype) -> NgramState:
        """Return the state before the first token."""
        context = np.full(ple.hash.context, ple.ngrams.eos, np.int64)
        before = (ple.ngrams.kernel - 1) * ple.ngrams.size  # rows that the convolution reads
        return cls(context, mx.zeros((1, before, ple.args.width), dtype))

    def advance(self, tokens: Ints, rows: mx.array, *, keep: bool) -> None:
        """Append `tokens` and their `rows [1, w, width]`. With `keep` the window can be cut later."""
        if keep:
            self.tapes.append(_NgramTape(self.context, self.rows, tokens, rows))
        self.context = np.concatenate([self.context, tokens])[-len(self.context) :]
        held = self.rows.shape[1]
        # A contiguous copy, since a view would keep the rows of the whole chunk in memory.
        self.rows = mx.contiguous(mx.concatenate([self.rows, rows], axis=1)[:, -held:])

    def apply_commit(self, whole: int, cut: int | None) -> None:
        """See `LayerCache.apply_commit`."""
        if cut is None:
            del self.tapes[:whole]
            return
        tape = self.tapes[whole]
        self.tapes.clear()
        self.context, self.rows = tape.context_before, tape.rows_before
        if cut:
            self.advance(tape.tokens[:cut], tape.rows[:, :cut], keep=False)

    def arrays(self) -> list[mx.array]:
        """Return the state as arrays. Token ids are uint32 on the wire and on disk."""
        return [self.rows, mx.array(self.context.astype(np.uint32))]


@dataclass
class NgramGDNCache(LayerCache):
    """The state of a layer with a PLE. `gdn` is that of its GatedDeltaNet, of the variant that computes it."""

    gdn: Any
    ngrams: NgramState
    coming: Ints | None = None

    def take_coming(self, width: int) -> Ints:
        """Return the tokens of the next `width` rows. Raises ProtocolError if the stage does not know them."""
        tokens, self.coming = self.coming, None
        if tokens is None or len(tokens) != width:
            raise ProtocolError(f"a layer with n-grams has no tokens for {width} rows")
        return tokens

    def apply_commit(self, whole: int, cut: int | None, trim: int) -> None:
        self.gdn.apply_commit(whole, cut, trim)
        self.ngrams.apply_commit(whole, cut)

    def copy(self) -> NgramGDNCache:
        ngrams = NgramState(self.ngrams.context, mx.contiguous(self.ngrams.rows))
        return NgramGDNCache(self.gdn.copy(), ngrams)

    def arrays(self) -> list[mx.array]:
        return [*self.gdn.arrays(), *self.ngrams.arrays()]

    @property
    def nbytes(self) -> int:
        return int(self.gdn.nbytes) + sum(array.nbytes for array in self.ngrams.arrays())

    def backup_arrays(self, start: int, end: int | None = None) -> list[mx.array]:
        return self.copy().arrays()

    def with_backups(self, states: Sequence[Sequence[mx.array]], length: int) -> NgramGDNCache:
        conv, state, rows, context = checked_state(states[-1], self.arrays())
        ngrams = NgramState(np.array(context).astype(np.int64), rows)
        return replace(self, gdn=self.gdn.with_backups([[conv, state]], length), ngrams=ngrams)

    @property
    def cut_axes(self) -> tuple[CutAxis | None, ...]:
        return (*self.gdn.cut_axes, None, None)


class FlashNextLayer(StreamLayer):
    """A decoder layer around `mixer`."""

    kind = "flash-next"
    model = "Qwen3.8-Flash-Next"

    def __init__(self, layer: modules.FlashNextLayer, mixer: Mixer) -> None:
        connections = layer.attn_hyper_connection, layer.mlp_hyper_connection
        for connection in connections:
            connection.fuse_inputs()
        super().__init__(mixer, fuse_experts(layer.mlp), connections, dtype_of(layer))


def dtype_of(layer: modules.FlashNextLayer) -> mx.Dtype:
    """Return the type of the activations."""
    found: mx.Dtype = layer.attn_hyper_connection.hc_norm.weight.dtype
    return found


class NgramGDN(FlashNextLayer):
    """A GatedDeltaNet layer with a per-layer embedding before it."""

    def __init__(self, layer: modules.FlashNextLayer, mixer: Mixer) -> None:
        super().__init__(layer, mixer)
        self.ple = layer.ple

    def expect_tokens(self, chunks: Sequence[Ints]) -> None:
        self.ple.prefetch(chunks)

    def new_cache(self, kv_format: KVFormat) -> NgramGDNCache:
        gdn = self.mixer.new_cache(kv_format)
        return NgramGDNCache(gdn, NgramState.empty(self.ple, self.dtype))

    def forward(
        self,
        x: mx.array,
        caches: Sequence[NgramGDNCache],
        widths: Sequence[int],
        stay_open: Sequence[bool] = (),
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        x = x + self._ngrams(x, caches, widths, stay_open)
        return super().forward(x, [cache.gdn for cache in caches], widths, stay_open, holes)

    def _ngrams(
        self,
        x: mx.array,
        caches: Sequence[NgramGDNCache],
        widths: Sequence[int],
        stay_open: Sequence[bool],
    ) -> mx.array:
        """Return what the n-grams add to `x [rows, width]`, with one read of the disk for all sequences."""
        tokens = [cache.take_coming(width) for cache, width in zip(caches, widths, strict=True)]
        states = [cache.ngrams for cache in caches]
        embedded = self.ple.embed([(state.context, own) for state, own in zip(states, tokens, strict=True)])
        values, rows = self.ple.gate(x, embedded)
        parts, start = [], 0
        for state, own, keep in zip(states, tokens, stay_open, strict=True):
            new = rows[start : start + len(own)][None]
            seen = mx.concatenate([state.rows, new], axis=1)
            parts.append(nn.silu(self.ple.conv1d(seen)).squeeze(0))
            state.advance(own, mx.contiguous(new) if keep else new, keep=keep)
            start += len(own)
        return values + (parts[0] if len(parts) == 1 else mx.concatenate(parts))


class SparseMixer(BlockReader, AttentionLayer):
    """A mixer of Qwen Sparse Attention: queries read the blocks that the indexer scores highest, and the newest tokens.

    A query sees the whole blocks up to its own token, and reads at most `budget` tokens of them. Up to there the
    attention is the usual one, and no block is scored.
    """

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.indexer: modules.Indexer = attention.indexer
        self.sizes = self.indexer.args
        products = [attention.q_proj, attention.k_proj, attention.v_proj, self.indexer.index_qk_proj]
        self._products = side_by_side(products, FusedLinear.of)

    def fuse(self, fuse: object) -> SparseMixer:
        """Return itself, whose products are fused since the load."""
        return self

    def new_cache(self, kv_format: KVFormat) -> IndexedKV:
        attention = self.attention
        cache = IndexedKV(self.sizes.block, self.sizes.head_dim)
        return cache.with_rows(attention.num_key_value_heads, attention.head_dim)

    def mix(
        self,
        x: mx.array,
        caches: Sequence[IndexedKV],
        widths: Sequence[int],
        stay_open: Sequence[bool],
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        """See `Mixer.mix`."""
        attention, indexer = self.attention, self.indexer
        kv_heads = attention.num_key_value_heads
        heads = attention.num_attention_heads, kv_heads, kv_heads, self.sizes.heads + 1
        both, keys, values, index = (
            part.reshape(x.shape[0], n, -1) for part, n in zip(self._products(x), heads, strict=True)
        )
        q_rows, gate = mx.split(both, 2, axis=-1)
        q_rows, keys = attention.q_norm(q_rows), attention.k_norm(keys)
        queries, index_keys = indexer.q_layernorm(index[:, :-1]), index[:, -1:]
        rows = q_rows, keys, values, queries, index_keys
        outputs: list[mx.array] = []
        for group, (q, k, v, asked, raw) in self._groups(rows, caches, widths):
            q, k = self._rotated(q, k, group, holes)
            asked, _ = self._rotated(asked, asked[:, :1], group, holes)
            for i, cache in enumerate(group):
                cache.append_index(raw[i, 0])
                one, hole = slice(i, i + 1), holes[i] if holes else None
                out = self._read(q[one], k[one], v[one], asked[i, :].transpose(1, 0, 2), cache, hole)
                outputs.append(out.squeeze(0).transpose(1, 0, 2).reshape(out.shape[2], -1))
        merged = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        gated = merged * mx.sigmoid(gate.reshape(x.shape[0], -1))
        y: mx.array = self.attention.o_proj(gated)
        return y

    def _read(
        self, q: mx.array, k: mx.array, v: mx.array, queries: mx.array, cache: IndexedKV, hole: Hole | None
    ) -> mx.array:
        """Append `k` and `v [1, kv_heads, w, dim]` of one sequence, and return the attention of `q`."""
        offset, scale = cache.offset, self.attention.scale
        keys, values = cache.update_and_fetch(k, v)
        if cache.offset // self.sizes.block <= self.sizes.budget // self.sizes.block:
            # The last token reads all others.
            return full_attention(q, keys, values, offset, scale, hole)
        blocks = cache.block_keys(partial(self._pooled, cache.layout), hole)
        reads = SparseReads(q, keys, values, queries, blocks, offset, self.sizes, scale, None, hole, self.language)
        return sparse_attention(reads)

    def _pooled(self, layout: ImageLayout | None, keys: mx.array, first: int) -> mx.array:
        """Return the keys of blocks, rotated to the positions of their first tokens."""
        mean = keys.reshape(-1, self.sizes.block, keys.shape[-1]).astype(mx.float32).mean(axis=1)
        normed = self.indexer.k_layernorm(mean.astype(keys.dtype))
        rope, block = self.attention.rope, self.sizes.block
        if layout is not None:
            start = first * block
            rotations = image_rotations(rope, layout, start, keys.shape[0])
            if rotations is None:  # all text, but perhaps after images
                position = start + layout.shift(start)
                rotations = rotation_table(rope, position + keys.shape[0])[position:]
            return rotate(normed[:, None], rotations[: keys.shape[0] : block])[:, 0]
        by_block = nn.RoPE(rope.dims, base=rope.base, scale=float(block))
        rotated: mx.array = by_block(normed[None, None], offset=first)
        return rotated[0, 0]


def stream_layer(layer: modules.FlashNextLayer) -> StreamLayer:
    """Return a loaded layer behind the interface of this project. It fuses weights, so call it once."""
    if not layer.is_linear:
        return FlashNextLayer(layer, SparseMixer(layer.self_attn))
    mixer = GatedDelta(layer.linear_attn, dtype_of(layer), silu=layer.silu)
    return NgramGDN(layer, mixer) if "ple" in layer else FlashNextLayer(layer, mixer)
