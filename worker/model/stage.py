"""The forward pass of one stage: the layers of the span over flat rows of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer

from mtp.head.attention import KVFormat, add_attention
from mtp.head.draft_vocabulary import DraftVocabularySize
from mtp.kernels.cuda import backend
from mtp.kernels.packed_linear import FEW_ROWS
from mtp.kernels.projections import add_mlp
from proto.frame import Admit, Segment
from worker.cache.gdn_cache import GDNCache
from worker.cache.sequence_cache import LayerCache, SequenceCache
from worker.model.exact import ExactProducts
from worker.model.gdn import mix, net_of
from worker.model.join import join_stage
from worker.model.loader import StageModules
from worker.model.pack import pack_stage
from worker.model.packed_gdn import PackedGDN

Run = tuple[SequenceCache, Segment]
"""A segment that runs, and the sequence it extends."""

ALL_WORDS = DraftVocabularySize()

EVALUATED_FIRST = 2
"""Layers that start computing as soon as each is built."""

CADENCE = {"cpu": 1, "metal": 4, "cuda": 4}
"""Layers, after the first ones, that start computing together. On an H200 a pass over 64 layers takes 10.7 ms with 1,
10.7 with 4, 11.1 with 8 and 12.8 with 64."""


class Stage:
    """Layers `[start, end)` of the model, with the embedding on the first stage."""

    def __init__(
        self,
        modules: StageModules,
        kv_format: KVFormat,
        *,
        exact: bool = False,
        draft_vocab: DraftVocabularySize = ALL_WORDS,
    ) -> None:
        """Prepare `modules` for this backend. With `exact`, a row has the same bits with any rows beside it.

        `draft_vocab` is for the verifier of the last stage.

        Raises UsageError if that is impossible here.
        """
        self.dtype: mx.Dtype = modules.layers[0].input_layernorm.weight.dtype
        pack_stage(modules, kv_format)
        if backend() == "cpu" and not exact:  # exact mode probes MLX's own products
            join_stage(modules)
        self.modules = modules
        self.draft_vocab = draft_vocab
        self.kv_format = kv_format
        self._cadence = CADENCE[backend()]
        self._queries: int | None = None
        if exact:
            products = ExactProducts(self.dtype)
            products.apply(modules)
            self._queries = products.queries

    def new_sequence(self, admitted: Admit) -> SequenceCache:
        """Return the empty caches of an admitted sequence."""
        return SequenceCache(admitted, [self._new_cache(layer) for layer in self.modules.layers])

    def _new_cache(self, layer: DecoderLayer) -> LayerCache:
        if not layer.is_linear:
            return self.kv_format.new_cache()
        if isinstance(layer.linear_attn, PackedGDN):
            return layer.linear_attn.new_cache()
        return GDNCache.empty(net_of(layer.linear_attn), self.dtype)

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings of `tokens [rows]`: `[rows, hidden]`. First stage only."""
        embed_tokens = self.modules.embed_tokens
        assert embed_tokens is not None, "this stage is not the first"
        embedded: mx.array = embed_tokens(tokens)
        return embedded

    def forward(self, x: mx.array, runs: Sequence[Run]) -> mx.array:
        """Run `x [rows, hidden]` through the span. Rows belong to `runs` in order.

        Extends the window stack and the caches of every sequence. Raises ProtocolError, before any layer has run, when
        a segment does not follow the end of its sequence.
        """
        for sequence, segment in runs:
            sequence.extend(segment)
        parts = _parts(runs)
        if len(parts) == 1:
            return self._advance(x, runs)
        rows = row_ranges([segment.width for _, segment in runs])
        outputs: dict[int, mx.array] = {}
        for part in parts:
            taken = mx.concatenate([x[rows[i]] for i in part])
            y = self._advance(taken, [runs[i] for i in part])
            own = row_ranges([runs[i][1].width for i in part])
            outputs |= {i: y[span] for i, span in zip(part, own, strict=True)}
        return mx.concatenate([outputs[i] for i in range(len(runs))])

    def _advance(self, x: mx.array, runs: Sequence[Run]) -> mx.array:
        """Run all layers. A GPU computes some while Python builds the next."""
        for index, layer in enumerate(self.modules.layers):
            x = self._layer(layer, index, x, runs)
            if index < EVALUATED_FIRST or (index + 1) % self._cadence == 0:
                mx.async_eval(x)
        return x

    def _layer(self, layer: DecoderLayer, index: int, x: mx.array, runs: Sequence[Run]) -> mx.array:
        caches: list[Any] = [sequence.layers[index] for sequence, _ in runs]
        widths = [segment.width for _, segment in runs]
        norm, mlp = layer.input_layernorm, (layer.mlp, layer.post_attention_layernorm)
        if not layer.is_linear:
            x = add_attention(
                layer.self_attn, norm, x, caches, widths, queries=self._queries, mlp=mlp
            )
            return x.astype(self.dtype)
        stay_open = [segment.open for _, segment in runs]
        if isinstance(layer.linear_attn, PackedGDN):
            return layer.linear_attn.add(x, norm, caches, widths, stay_open, mlp)
        together = self._queries is None
        mixed = mix(layer.linear_attn, norm(x), caches, widths, stay_open, together=together)
        return add_mlp(*mlp, x + mixed).astype(self.dtype)


def _parts(runs: Sequence[Run]) -> list[list[int]]:
    """Return which of `runs` go through the layers together: all, or open windows apart from prompt chunks.

    Few rows and many take different kernels. A window apart from a long chunk is computed as if it were alone, and
    does not keep the chunk's rows in memory while it is open.
    """
    every = list(range(len(runs)))
    if sum(segment.width for _, segment in runs) <= FEW_ROWS or backend() != "cuda":
        return [every]
    windows = [i for i in every if runs[i][1].open]
    chunks = [i for i in every if not runs[i][1].open]
    return [part for part in (windows, chunks) if part]


def row_ranges(widths: Sequence[int]) -> list[slice]:
    """Return the rows of each of several runs that follow each other."""
    ends = list(accumulate(widths))
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
