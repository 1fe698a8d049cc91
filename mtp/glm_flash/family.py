"""GLM-5.3-Flash: Kimi Delta Attention, sparse latent attention, and manifold-constrained hyper-connections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mtp.checkpoint.families.family import Place, head_name
from mtp.checkpoint.families.fields import Text
from mtp.checkpoint.families.parameters import PROJECTIONS, STORED, Parameter
from mtp.checkpoint.families.qwen3_5 import HybridFamily, interval_of
from mtp.checkpoint.families.shape import STOCK_LAUNCHES, LayerShape, Shape
from mtp.glm_flash.args import RULES, GlmArgs, find_problem
from mtp.glm_flash.layers import GlmHead, GlmLayer
from mtp.glm_flash.modules import DecoderLayer, GlmModel, StreamMean
from mtp.layers.layer import Layer

LAUNCHES = 1197 / 45
"""Launches of a layer where streams, experts and KDA are fused, as TensorFold counted them on an M3 Ultra. This project
has 22.5 (tests/parity/test_kernel_count.py). Programs of 3,578 launches a token have 27.8 and 29.5 tokens/s there."""

ACCEPTED = (0.84, 0.65, 0.5)
"""The share of each draft that is right after right ones, by TensorFold's speeds of one to three drafts."""

DELTA = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
    "linear_lower_bound": "gate_lower_bound",
}
"""The fields of Kimi Delta Attention: by transformers' names, those in the publisher's `linear_attn_config`."""


def _flat_taps(weight: mx.array) -> mx.array:
    """Return the taps `[C, K]` of a convolution, which some store as `[C, 1, K]` or `[C, K, 1]`."""
    return weight.reshape(weight.shape[0], -1)


class GlmFlash(HybridFamily):
    """Mixtures of experts with hyper-connections. mlx-lm has no model of them."""

    releases = "GLM-5.3-Flash"
    model_types: ClassVar = {"glm5_next": "glm5_next", "glm5_next_text": "glm5_next"}
    prefix = "language_model."
    attention_types = ("deepseek_sparse_attention", "indexed_attention", "full_attention")
    rules: ClassVar = {**RULES, **HybridFamily.rules, **RULES}
    is_own = True
    sees_images = False
    parameters = (
        Parameter(r".*\.self_attn\.(A_log|dt_bias)", "rows", keeps_type=True),
        Parameter(r".*\.(e_score_correction_bias|hc_(attn|ffn)_(fn|base|scale))", keeps_type=True),
        Parameter(r".*\.[qkv]_conv1d\.weight", "rows", _flat_taps, _flat_taps),
        Parameter(rf".*\.((q|kv|f|g)_b_proj|b_proj){STORED}", "rows"),
        *PROJECTIONS,
    )

    def named_fields(self, text: Text) -> Text:
        text = super().named_fields(text)
        delta: Any = text.get("linear_attn_config")
        flat = {name: text.get(name, -5.0 if name == "linear_lower_bound" else None) for name in DELTA}
        if isinstance(delta, dict):  # the publisher's; transformers writes the values beside it, or alone
            flat = {name: delta.get(theirs, flat[name]) for name, theirs in DELTA.items()}
            if flat["linear_lower_bound"] is None and delta.get("safe_gate", True):
                flat["linear_lower_bound"] = -5.0
        heads, dim = flat["linear_num_heads"], flat["linear_head_dim"]
        return {
            **text,
            **flat,
            "rms_norm_eps": text.get("rms_norm_eps", 1e-5),
            "rope_parameters": {"rope_theta": 1.0},  # there is no RoPE
            "head_dim": dim,
            "num_key_value_heads": heads,
            "num_experts": text.get("n_routed_experts"),
            "shared_expert_intermediate_size": text.get("moe_intermediate_size"),
            "linear_num_key_heads": heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": dim,
            "linear_value_head_dim": dim,
        }

    def backbone(self, text: Text) -> nn.Module:
        linear = [self._is_linear(text, layer) for layer in range(text["num_hidden_layers"])]
        return GlmModel(self.text_args(text), GlmArgs.of(text), linear)

    def layer(self, text: Text, index: int) -> nn.Module:
        return DecoderLayer(GlmArgs.of(text), index, linear=self._is_linear(text, index))

    def norm(self, text: Text) -> nn.Module:
        return StreamMean(GlmArgs.of(text))

    def head(self, text: Text) -> GlmHead:
        return GlmHead(self.text_args(text), GlmArgs.of(text))

    def stage_layer(self, layer: Any) -> Layer:
        return GlmLayer(layer)

    def find_own_problem(self, text: Text) -> str | None:
        return find_problem(text)

    def place(self, local: str, text: Text) -> Place | None:
        """Return the place of a tensor. The publisher stores the MTP head as one more layer after the last one."""
        head = f"layers.{text['num_hidden_layers']}."
        if local.startswith(head):
            return Place("mtp", head_name(local.removeprefix(head), self.head_modules))
        return super().place(local, text)

    def attention_shape(self, text: Text) -> LayerShape:
        """Return the latent, the key and the gate of each token, and the keys of blocks in fp32."""
        indexer = GlmArgs.of(text).indexer
        index = 2 * indexer.head_dim + 2 * indexer.head_dim // indexer.block
        return LayerShape("attention", token_values=text["kv_lora_rank"] + index)

    def shape(self, text: Text) -> Shape:
        return replace(
            super().shape(text),
            streams=text["hc_mult"],
            launches=LAUNCHES / STOCK_LAUNCHES,
            quantizes_kv=False,
            accepted=ACCEPTED,
        )

    def convert_text(self, text: Text) -> None:
        """Remove the fields that `named_fields` adds: other programs read those of the publisher."""
        text.pop("rope_parameters", None)

    @staticmethod
    def _is_linear(text: Text, layer: int) -> bool:
        return (layer + 1) % interval_of(text) != 0
