"""Checkpoints: configs, headers, names and weights of Qwen3.5/3.6/3.8 and Qwen3-Next, raw or converted by mlx-lm."""

from __future__ import annotations

from mtp.checkpoint.format.checkpoint import Checkpoint, MtpStatus
from mtp.checkpoint.format.config import LayerKind, ModelConfig
from mtp.checkpoint.format.shard import TensorInfo

__all__ = ["Checkpoint", "LayerKind", "ModelConfig", "MtpStatus", "TensorInfo"]
