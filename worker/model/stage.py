"""One stage's forward pass: the span's layers over flat rows of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer

from mtp.head.attention import KV, KVFormat, attend
from proto.frame import Admit, Segment
from worker.cache.gdn_cache import GDNCache
from worker.cache.sequence_cache import LayerCache, SequenceCache
from worker.model.gdn import mix
from worker.model.loader import StageModules

Run = tuple[SequenceCache, Segment]
"""A segment that runs, and the sequence it extends."""


class Stage:
    """Layers `[start, end)` of the model, with the embedding on the first stage."""

    def __init__(self, modules: StageModules, kv_format: KVFormat) -> None:
        self.modules = modules
        self.kv_format = kv_format
        self.dtype: mx.Dtype = modules.layers[0].input_layernorm.weight.dtype

    def new_sequence(self, admitted: Admit) -> SequenceCache:
        layers: list[LayerCache] = [
            GDNCache.empty(layer.linear_attn, self.dtype)
            if layer.is_linear
            else self.kv_format.new_cache()
            for layer in self.modules.layers
        ]
        return SequenceCache(admitted, layers)

    def embed(self, tokens: Sequence[int]) -> mx.array:
        """Embedding rows of `tokens`: `[len(tokens), hidden]`. First stage only."""
        embed_tokens = self.modules.embed_tokens
        assert embed_tokens is not None, "this stage is not the first"
        embedded: mx.array = embed_tokens(mx.array(list(tokens), mx.uint32))
        return embedded

    def forward(self, x: mx.array, runs: Sequence[Run]) -> mx.array:
        """Run `x [rows, hidden]` through the span. Rows belong to `runs` in order.

        Extends every sequence's state machine and caches. Raises ProtocolError, before any layer has run, when a
        segment does not fit its sequence's end.
        """
        for sequence, segment in runs:
            sequence.extend(segment)
        for index, layer in enumerate(self.modules.layers):
            x = self._layer(layer, index, x, runs)
            mx.async_eval(x)  # a GPU computes this layer while Python builds the next
        return x

    def _layer(self, layer: DecoderLayer, index: int, x: mx.array, runs: Sequence[Run]) -> mx.array:
        caches = [sequence.layers[index] for sequence, _ in runs]
        widths = [segment.width for _, segment in runs]
        normed = layer.input_layernorm(x)
        if layer.is_linear:
            taped = [segment.open for _, segment in runs]
            mixed = mix(layer.linear_attn, normed, cast(list[GDNCache], caches), widths, taped)
        else:
            mixed = attend(layer.self_attn, normed, cast(list[KV], caches), widths)
        h = x + mixed
        return h + layer.mlp(layer.post_attention_layernorm(h))
