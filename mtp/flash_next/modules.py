"""The modules of Flash-Next, by the parameter names of its checkpoints and the arithmetic of transformers' `qwen4_exp`.

Rows between layers have all residual streams side by side: `[rows, streams x hidden]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add, mul
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.qwen3_5 import GatedDeltaNet, SparseMoeBlock, TextModelArgs
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from mtp.flash_next.args import FlashNextArgs, NgramArgs
from mtp.flash_next.ngrams import Ints, NgramHash, NgramTable
from mtp.layers.linear import FusedLinear, pad_outputs
from mtp.layers.reference.gdn import SigmoidGatedNorm
from mtp.layers.source_kernel import SourceKernel
from mtp.layers.sparse_attention import IndexerArgs
from mtp.layers.stream_rows import NORM_SOURCE, add_and_norm


class StreamNorm(nn.Module):
    """RMSNorm of each stream by itself, with a weight for all of them."""

    def __init__(self, args: FlashNextArgs) -> None:
        super().__init__()
        self.weight = mx.ones((args.width,))
        self.streams, self.eps = args.streams, args.eps

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x [rows, width]` normalized. It is rounded once, after the weight."""
        apart = x.reshape(-1, self.streams, x.shape[-1] // self.streams).astype(mx.float32)
        normed = mx.fast.rms_norm(apart, None, self.eps).reshape(x.shape)
        return _weighted(normed, self.weight, x)


@partial(mx.compile, shapeless=True)
def _weighted(normed: mx.array, weight: mx.array, x: mx.array) -> mx.array:
    return (normed * weight.astype(mx.float32)).astype(x.dtype)


class HyperConnection(nn.Module):
    """The gated mixer of the streams before a block, and the gates of the block's output after it."""

    def __init__(self, args: FlashNextArgs, *, injects: bool = True) -> None:
        super().__init__()
        self.streams, self.rank, self.width = args.streams, args.rank, args.width
        self.hc_norm = StreamNorm(args)
        self.input_mix_weight_down = nn.Linear(args.width, args.rank, bias=False)
        self.input_mix_weight_up = nn.Linear(args.rank, args.width, bias=False)
        if injects:
            self.block_inject_weight = nn.Linear(args.width, args.streams, bias=False)
        self._fused: FusedLinear | None = None
        self.language: type[SourceKernel] | None = None
        """The language of the kernel that adds and normalizes few rows in place of MLX's operations."""

    def fuse_inputs(self) -> None:
        """Make one product of the two that read all streams, if they have one format. Call it once, after the load."""
        pad_outputs(self.block_inject_weight, self.rank)
        self._fused = FusedLinear.of([self.input_mix_weight_down, self.block_inject_weight])
        self._eps = mx.array([self.hc_norm.eps])

    def __call__(self, x: mx.array) -> mx.array:
        """Return the mix of the streams of `x`: `[rows, hidden]`."""
        normed = self.hc_norm(x)
        return self._mixed(normed, self.input_mix_weight_down(normed))

    @property
    def kernel(self) -> tuple[str, str, str, int]:
        """See `Connection.kernel`."""
        return "stream_norm", f"{self.streams} streams", NORM_SOURCE, self.width

    def read(
        self, x: mx.array, block: mx.array | None = None, gates: Any = None
    ) -> tuple[mx.array, mx.array, mx.array]:
        """See `Connection.read`. The last columns of the gates `[rows, any]` are the logits."""
        added = None if block is None else (block, gates)
        if self.language is not None and x.shape[0] <= self.language.most_rows:
            sizes = self.streams, 0 if added is None else self._first_logit(added[1])
            x, normed = add_and_norm(self.language, x, added, self.hc_norm.weight, self._eps, sizes)
        else:
            x = x if added is None else self.spread(x, *added)
            normed = self.hc_norm(x)
        if self._fused is None:
            low, logits = self.input_mix_weight_down(normed), self.block_inject_weight(normed)
        else:
            logits = self._fused(normed)
            low = logits[:, : self.rank]
        return x, self._mixed(normed, low), logits

    def spread(self, x: mx.array, block: mx.array, gates: mx.array) -> mx.array:
        """Return the streams `x` with the output of a block `[rows, hidden]`, each by its gate."""
        first = self._first_logit(gates)
        apart = x.reshape(x.shape[0], self.streams, -1)
        logits = gates[:, first : first + self.streams, None]
        return _added(apart, block[:, None], logits, self.streams).reshape(x.shape)

    def _first_logit(self, gates: mx.array) -> int:
        """Return the column of the first logit in `gates`. Fused ones follow the columns of the mixer."""
        return self.rank if gates.shape[1] > self.rank else 0

    def _mixed(self, normed: mx.array, low: mx.array) -> mx.array:
        weights = self.input_mix_weight_up(_low(low, self.streams))
        return _mean(mx.split(weights, self.streams, -1), mx.split(normed, self.streams, -1))


@partial(mx.compile, shapeless=True)
def _low(x: mx.array, streams: int) -> mx.array:
    x = x / streams
    return x * mx.sigmoid(x)


@partial(mx.compile, shapeless=True)
def _mean(weights: Any, streams: Any) -> mx.array:
    """Return the mean of the streams after their weights."""
    total: mx.array = reduce(add, map(mul, map(mx.sigmoid, weights), streams))
    return total / len(streams)


@partial(mx.compile, shapeless=True)
def _added(x: mx.array, block: mx.array, logits: mx.array, streams: int) -> mx.array:
    return x + block * (2 * mx.sigmoid(logits / streams))


class Indexer(nn.Module):
    """The projections of the indexer: queries, and one key for a token."""

    def __init__(self, hidden: int, args: IndexerArgs, eps: float) -> None:
        super().__init__()
        self.args = args
        self.index_qk_proj = nn.Linear(hidden, (args.heads + 1) * args.head_dim, bias=False)
        self.q_layernorm = nn.RMSNorm(args.head_dim, eps=eps)
        self.k_layernorm = nn.RMSNorm(args.head_dim, eps=eps)


class PerLayerEmbedding(nn.Module):
    """The embedding of the n-grams at each token, added to all streams before a layer. `table` is set by the loader."""

    def __init__(self, args: FlashNextArgs, ngrams: NgramArgs, place: int) -> None:
        super().__init__()
        self.args, self.ngrams = args, ngrams
        self.hash = NgramHash(ngrams, place)
        self.table: NgramTable | None = None
        self.key_proj = nn.Linear(ngrams.dim, args.width, bias=False)
        self.value_proj = nn.Linear(ngrams.dim, args.hidden, bias=False)
        self.norm_key, self.norm_query = StreamNorm(args), StreamNorm(args)
        self.norm_conv = StreamNorm(args)
        width, kernel, step = args.width, ngrams.kernel, ngrams.size
        self.conv1d = nn.Conv1d(width, width, kernel, dilation=step, groups=width, bias=False)

    def embed(self, texts: Sequence[tuple[Ints, Ints]]) -> mx.array:
        """Return the embeddings `[n, dim]` of the tokens of `texts`, each of which has the tokens before them, too."""
        assert self.table is not None, "the loader has set it"
        ids = np.concatenate([self.hash.row_ids(np.concatenate(text)) for text in texts])
        dtype = self.norm_key.weight.dtype
        return self.table.read(ids.reshape(-1), self.ngrams.row_dim, dtype).reshape(len(ids), -1)

    def prefetch(self, texts: Sequence[Ints]) -> None:
        """Let the disk read the rows of the tokens of `texts`, after those that are the context of the others."""
        ids = [self.hash.row_ids(text) for text in texts if len(text) > self.hash.context]
        if self.table is not None and ids:
            self.table.prefetch(np.concatenate(ids))

    def gate(self, x: mx.array, embedded: mx.array) -> tuple[mx.array, mx.array]:
        """Return the gated values of all streams `[rows, width]`, and what the convolution reads of them."""
        streams = self.args.streams
        apart = (x.shape[0], streams, self.args.hidden)
        key = self.norm_key(self.key_proj(embedded)).reshape(apart)
        query = self.norm_query(x).reshape(apart)
        match = (key * query).sum(-1, keepdims=True) / self.args.hidden**0.5
        match = mx.sqrt(mx.maximum(mx.abs(match), 1e-6)) * mx.sign(match)
        values = mx.sigmoid(match) * self.value_proj(embedded)[:, None]
        values = values.reshape(x.shape)
        return values, self.norm_conv(values)


class FlashNextModel(nn.Module):
    """All modules, with the names of a converted checkpoint, for the conversion. It computes nothing."""

    def __init__(self, fields: TextModelArgs, args: FlashNextArgs) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(fields.vocab_size, fields.hidden_size)
        layers = range(fields.num_hidden_layers)
        self.model.layers = [FlashNextLayer(fields, args, layer) for layer in layers]
        self.model.hyper_connection_mixer = HyperConnection(args, injects=False)
        if not fields.tie_word_embeddings:
            self.lm_head = nn.Linear(fields.hidden_size, fields.vocab_size, bias=False)

    @property
    def quant_predicate(self) -> Callable[[str, nn.Module], bool | dict[str, int]]:
        """Return 8 bits for the routers, as for Qwen3.5, and True for other modules."""
        eight = {"group_size": 64, "bits": 8}
        return lambda path, _: eight if path.endswith(("mlp.gate", "shared_expert_gate")) else True


class FlashNextLayer(nn.Module):
    """A decoder layer: an optional PLE, GatedDeltaNet or sparse attention, and experts."""

    def __init__(self, fields: TextModelArgs, args: FlashNextArgs, index: int) -> None:
        super().__init__()
        self.is_linear = (index + 1) % fields.full_attention_interval != 0
        if self.is_linear:
            net: Any = GatedDeltaNet(fields)
            self.linear_attn = net
            self.silu = args.gate != "sigmoid"
            if not self.silu:
                net.norm = SigmoidGatedNorm(fields.linear_value_head_dim, args.eps)
        else:
            sizes: Any = fields
            self.self_attn: Any = Qwen3NextAttention(sizes)
            self.self_attn.indexer = Indexer(args.hidden, args.indexer, args.eps)
        experts: Any = fields
        self.mlp = SparseMoeBlock(experts)
        self.attn_hyper_connection = HyperConnection(args)
        self.mlp_hyper_connection = HyperConnection(args)
        if args.ngrams is not None and index in args.ngrams.layers:
            self.ple = PerLayerEmbedding(args, args.ngrams, args.ngrams.layers.index(index))
