"""Qwen3.8-Flash-Next, a prototype of Qwen4: hyper-connections, sparse attention, and embeddings of n-grams."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mtp.checkpoint.families.family import OpenCheckpoint, Place
from mtp.checkpoint.families.fields import Text
from mtp.checkpoint.families.parameters import Parameter, add_one, swap_taps
from mtp.checkpoint.families.qwen3_5 import HybridFamily
from mtp.checkpoint.families.shape import LayerShape, Shape
from mtp.flash_next.args import RULES, FlashNextArgs, find_problem
from mtp.flash_next.head import FlashNextHead
from mtp.flash_next.layers import stream_layer
from mtp.flash_next.modules import FlashNextLayer, FlashNextModel, HyperConnection
from mtp.flash_next.ngrams import NgramHash, convert_rows, is_row, open_table, row_sizes
from mtp.layers.layer import Layer

_DERIVED = re.compile(r"layers\.(\d+)\.ple\.ple_embedding\.(\w+)")
"""The tensors beside a table, such as the primes of its hash, which transformers stores too."""


class FlashNext(HybridFamily):
    """Mixtures of experts with hyper-connections. mlx-lm has no model of them."""

    releases = "Qwen3.8-Flash-Next"
    model_types: ClassVar = {"qwen4_exp": "qwen4_exp", "qwen4_exp_text": "qwen4_exp"}
    head_types: ClassVar = {"qwen4_exp_mtp": "qwen4_exp"}
    prefix = "language_model."
    attention_types = ("full_attention", "indexed_attention", "qwen_sparse_attention")
    rules: ClassVar = {**HybridFamily.rules, **RULES}
    is_own = True
    head_modules = HybridFamily.head_modules | {"fc_embedding", "fc_hidden", "hyper_connection_mixer"}
    ends: ClassVar = {**HybridFamily.ends, "hyper_connection_mixer": "norm"}
    parameters = (
        Parameter(r".*\.(hc_norm|q_layernorm|k_layernorm|norm_key|norm_query|norm_conv)\.weight", raw=add_one),
        Parameter(r".*\.ple\.conv1d\.weight", raw=swap_taps),
        *HybridFamily.parameters,
    )

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

    def find_own_problem(self, text: Text) -> str | None:
        return find_problem(text)

    def attention_shape(self, text: Text) -> LayerShape:
        """Return keys and values, and the keys of the indexer. Those of blocks are fp32."""
        found, indexer = super().attention_shape(text), FlashNextArgs.of(text).indexer
        index = indexer.head_dim + 2 * indexer.head_dim // indexer.block
        return replace(found, token_values=found.token_values + index)

    def linear_shape(self, text: Text, layer: int) -> LayerShape:
        """Return the state of a GatedDeltaNet, and the rows of the convolution of n-grams."""
        found, args = super().linear_shape(text, layer), FlashNextArgs.of(text)
        if args.ngrams is None or layer not in args.ngrams.layers:
            return found
        rows = (args.ngrams.kernel - 1) * args.ngrams.size * args.width
        return replace(found, sequence_values=found.sequence_values + rows, reads_tokens="ple_layer_ids")

    def shape(self, text: Text) -> Shape:
        streams = FlashNextArgs.of(text).streams
        return replace(super().shape(text), streams=streams, can_cut=False, quantizes_kv=False)

    def place(self, local: str, text: Text) -> Place | None:
        found = super().place(local, text)
        if found is None:
            return None
        if is_row(found.name):
            return found._replace(use="on disk")
        return found if self.derived_values(text, local) is None else found._replace(use="ignored")

    def derived_values(self, text: Text, local: str) -> list[int] | None:
        """Return the values of a stored tensor of integers that follow from config.json, or None for other tensors."""
        if (found := _DERIVED.fullmatch(local)) is None:
            return None
        ngrams = FlashNextArgs.of(text).ngrams
        if ngrams is None or int(found[1]) not in ngrams.layers:
            return None
        return NgramHash(ngrams, ngrams.layers.index(int(found[1]))).stored_values.get(found[2])

    def open_on_disk(self, checkpoint: OpenCheckpoint, part: str, layer: nn.Module) -> None:
        if "ple" in layer:
            layer.ple.table = open_table(checkpoint, part, layer.ple.hash.rows)

    def convert_on_disk(
        self, checkpoint: OpenCheckpoint, cast: Callable[[mx.array], mx.array], bits: int | None
    ) -> dict[str, mx.array]:
        return convert_rows(checkpoint, cast, bits)

    def sizes_on_disk(self, text: Text, bits: int | None) -> dict[str, tuple[str, tuple[int, int]]]:
        return row_sizes(FlashNextArgs.of(text).ngrams, bits)

    def convert_text(self, text: Text) -> None:
        """Change nothing: no other program reads the fields in another way."""
