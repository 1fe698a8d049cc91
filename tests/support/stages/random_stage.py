"""Stages of random weights in 4 bits, as wide as real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.parts import part_module
from mtp.layers.layer import Layer
from mtp.layers.reference import reference_layer
from proto.span import Span
from tests.support.checkpoints.checkpoints import config_of
from worker.model.loader import StageModules


def wide_config(eighths: int, layers: int) -> ModelConfig:
    """Return layers of `eighths` eighths of the width of Qwen3.5-27B."""
    config = config_of(
        moe=False, layers=layers, hidden=640 * eighths, vocab=4096, tie=False, dtype=mx.bfloat16
    )
    config["text_config"] |= {
        "intermediate_size": 2176 * eighths,
        "num_attention_heads": 3 * eighths,
        "num_key_value_heads": max(eighths // 2, 1),
        "head_dim": 256,
        "linear_num_value_heads": 6 * eighths,
        "linear_num_key_heads": 2 * eighths,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    return ModelConfig.parse(Path("config.json"), config)


def random_stage(config: ModelConfig) -> StageModules:
    """Return all layers and the embedding."""

    def part(name: str) -> Any:
        holder = nn.Module()
        holder.part = part_module(config, name)
        holder.set_dtype(mx.bfloat16)
        nn.quantize(holder, group_size=64, bits=4)
        mx.eval(holder.parameters())
        return holder.part.eval()

    layers: list[Layer] = [reference_layer(part(f"layers.{i}")) for i in range(config.num_layers)]
    span = Span(0, config.num_layers)
    return StageModules(config, span, layers, mx.bfloat16, part("embed"))
