"""Qwen3.8-Flash-Next, a prototype of Qwen4: hyper-connections, sparse attention, and embeddings of n-grams."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import mlx.nn as nn
from mlx_lm.models.qwen3_5 import TextModelArgs

from mtp.checkpoint.families.family import Family, Text, model_args
from mtp.flash_next.args import RULES, FlashNextArgs, find_problem
from mtp.flash_next.head import FlashNextHead
from mtp.flash_next.layers import stream_layer
from mtp.flash_next.modules import FlashNextLayer, FlashNextModel, HyperConnection
from mtp.flash_next.ngrams import NgramHash
from mtp.layers.layer import Layer

_TABLE = re.compile(
    r"(layers\.\d+)\.ple\.ple_embedding\.ngram_embedding\.(?:shards?[._](\d+)\.)?(weight|scales|biases|weight_scale)"
)


_DERIVED = re.compile(r"layers\.(\d+)\.ple\.ple_embedding\.(\w+)")
"""The tensors beside a table, such as the primes of its hash, which transformers stores too."""


class FlashNext(Family):
    """Mixtures of experts with hyper-connections. mlx-lm has no model of them."""

    releases = "Qwen3.8-Flash-Next"
    model_types: ClassVar = {"qwen4_exp": "qwen4_exp", "qwen4_exp_text": "qwen4_exp"}
    head_types: ClassVar = {"qwen4_exp_mtp": "qwen4_exp"}
    prefix = "language_model."
    attention_types: ClassVar = ("full_attention", "indexed_attention", "qwen_sparse_attention")
    rules: ClassVar = {**Family.rules, **RULES}
    cuts_layers = False
    quantizes_kv = False
    is_own = True
    head_modules = (*Family.head_modules, "fc_embedding", "fc_hidden", "hyper_connection_mixer")
    offset_norms = (
        *Family.offset_norms, "hc_norm", "q_layernorm", "k_layernorm", "norm_key", "norm_query",
        "norm_conv",
    )  # fmt: skip

    def text_args(self, text: Text) -> TextModelArgs:
        return model_args(text)

    def backbone(self, text: Text) -> nn.Module:
        return FlashNextModel(self.text_args(text), FlashNextArgs.of(text))

    def layer(self, text: Text, index: int) -> nn.Module:
        return FlashNextLayer(self.text_args(text), FlashNextArgs.of(text), index)

    def norm(self, text: Text) -> nn.Module:
        return HyperConnection(FlashNextArgs.of(text), injects=False)

    def head(self, text: Text) -> FlashNextHead:
        return FlashNextHead(self.text_args(text), FlashNextArgs.of(text))

    def stage_layer(self, layer: Any) -> Layer:
        return stream_layer(layer)

    def find_problem(self, text: Text) -> str | None:
        return find_problem(text)

    def streams(self, text: Text) -> int:
        return FlashNextArgs.of(text).streams

    def token_layers(self, text: Text) -> tuple[int, ...]:
        ngrams = FlashNextArgs.of(text).ngrams
        return () if ngrams is None else ngrams.layers

    def table_part(self, local: str) -> tuple[str, str, int] | None:
        found = _TABLE.fullmatch(local)
        return None if found is None else (found[1], found[3], int(found[2] or 0))

    def derived_values(self, text: Text, local: str) -> list[int] | None:
        if (found := _DERIVED.fullmatch(local)) is None:
            return None
        ngrams = FlashNextArgs.of(text).ngrams
        if ngrams is None or int(found[1]) not in ngrams.layers:
            return None
        return NgramHash(ngrams, ngrams.layers.index(int(found[1]))).stored_values.get(found[2])

    def kv_values(self, text: Text, kv_heads: int, head_dim: int) -> int:
        indexer = FlashNextArgs.of(text).indexer
        index = indexer.head_dim + 2 * indexer.head_dim // indexer.block  # keys of blocks are fp32
        return super().kv_values(text, kv_heads, head_dim) + index

    def token_values(self, text: Text) -> int:
        args = FlashNextArgs.of(text)
        ngrams = args.ngrams
        return 0 if ngrams is None else (ngrams.kernel - 1) * ngrams.size * args.width

    def convert_text(self, text: Text) -> None:
        """Change nothing: no other program reads the fields in another way."""
