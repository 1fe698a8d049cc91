"""GLM-5.3-Flash: Kimi Delta Attention, sparse latent attention, and manifold-constrained hyper-connections."""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.nn as nn
from mlx_lm.models.qwen3_5 import TextModelArgs

from mtp.checkpoint.families.family import Family, Text, model_args
from mtp.glm_flash.args import RULES, GlmArgs, find_problem
from mtp.glm_flash.head import GlmHead
from mtp.glm_flash.layers import GlmLayer
from mtp.glm_flash.modules import DecoderLayer, GlmModel, StreamMean
from mtp.layers.layer import Layer

DELTA = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
    "linear_lower_bound": "gate_lower_bound",
}
"""The fields of Kimi Delta Attention: by transformers' names, those in the publisher's `linear_attn_config`."""


class GlmFlash(Family):
    """Mixtures of experts with hyper-connections. mlx-lm has no model of them."""

    releases = "GLM-5.3-Flash"
    model_types: ClassVar = {"glm5_next": "glm5_next", "glm5_next_text": "glm5_next"}
    head_types: ClassVar = {}
    prefix = "language_model."
    attention_types: ClassVar = ("deepseek_sparse_attention", "indexed_attention", "full_attention")
    rules: ClassVar = {**RULES, **Family.rules, **RULES}
    quantizes_kv = False
    is_own = True
    sees_images = False
    launches = 3.0  # by the 27.8 and 29.5 tokens/s that others measured on an M3 Ultra
    head_is_layer = True
    offset_norms = ()

    def named_fields(self, text: Text) -> Text:
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

    def text_args(self, text: Text) -> TextModelArgs:
        return model_args(text)

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

    def find_problem(self, text: Text) -> str | None:
        return find_problem(text)

    def streams(self, text: Text) -> int:
        return GlmArgs.of(text).streams

    def kv_values(self, text: Text, kv_heads: int, head_dim: int) -> int:
        indexer = GlmArgs.of(text).indexer
        # The key and the gate of each token, and the keys of blocks in fp32.
        return int(text["kv_lora_rank"]) + 2 * indexer.head_dim + 2 * indexer.head_dim // indexer.block

    def convert_text(self, text: Text) -> None:
        """Remove the fields that `named_fields` adds: other programs read those of the publisher."""
        text.pop("rope_parameters", None)

    @staticmethod
    def _is_linear(text: Text, layer: int) -> bool:
        return (layer + 1) % (text.get("full_attention_interval") or 4) != 0
