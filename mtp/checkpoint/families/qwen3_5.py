"""Qwen3.5, 3.6 and 3.8, whose modules the engine runs: dense or with experts, with or without a vision part."""

from __future__ import annotations

from typing import ClassVar

import mlx.nn as nn
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModel, TextModelArgs

from mtp.checkpoint.families.fields import Text
from mtp.checkpoint.families.hybrid import HybridFamily, model_args


class Qwen35(HybridFamily):
    """GatedDeltaNet and gated attention, with mlx-lm's own modules."""

    releases = "Qwen3.5, Qwen3.6 or Qwen3.8"
    model_types: ClassVar = {
        "qwen3_5": "qwen3_5",
        "qwen3_5_text": "qwen3_5",
        "qwen3_5_moe": "qwen3_5_moe",
        "qwen3_5_moe_text": "qwen3_5_moe",
    }
    head_types: ClassVar = {"qwen3_5_mtp": "qwen3_5", "qwen3_5_moe_mtp": "qwen3_5_moe"}
    prefix = "language_model."

    def text_args(self, text: Text) -> TextModelArgs:
        """Return mlx-lm's arguments. The weights of the chosen experts have the sum 1, as in transformers."""
        return model_args({**text, "norm_topk_prob": True})

    def backbone(self, text: Text) -> nn.Module:
        return TextModel(self.text_args(text))

    def layer(self, text: Text, index: int) -> nn.Module:
        return DecoderLayer(self.text_args(text), index)

    def convert_text(self, text: Text) -> None:
        """Remove `norm_topk_prob`: mlx-lm would follow it, and transformers does not."""
        text.pop("norm_topk_prob", None)
