"""The vision tower of Qwen3.5: patches of one image in, rows of the model's hidden size out.

Names and arithmetic are those of transformers' `Qwen3_5VisionModel`. Images are computed one after another, without a
mask, and block after block, so that a GPU does other work between.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mtp.checkpoint.format.checkpoint import Checkpoint, Files
from mtp.checkpoint.format.names import vision_name
from mtp.layers.rope import rotate
from proto.errors import CheckpointError

SCORE_BYTES = 256 * 2**20
"""Bytes. Bound of the attention scores of one step. Steps of 64 MB left an H100 idle most of the time."""

COPY_BYTES = 2**22
"""Bytes of patches that become an array at once."""

PAUSE_SECONDS = 0.001
"""Seconds after each of these copies in which other threads may take Python's lock."""

PATCHES = "patch_embed.proj.weight"
"""The convolution of the patches `[hidden, channels, times, height, width]`. mlx-vlm stores the channels last."""

ACTIVATION = "gelu_pytorch_tanh"


MOST = 2**20
"""Bound of every size of a tower, far above those of published ones."""


@dataclass(frozen=True)
class VisionConfig:
    """The fields of `vision_config` that decide the tower."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    theta: float

    @classmethod
    def parse(cls, source: Path, fields: dict[str, Any], hidden_size: int) -> VisionConfig:
        """Check `vision_config`, which errors name as part of `source`. Raises CheckpointError."""
        names = [name for name in cls.__annotations__ if name != "theta"]
        for name in names:
            value = fields.get(name)
            if type(value) is not int or not 0 < value <= MOST:
                raise CheckpointError(
                    f"{source}: vision_config.{name} is {value!r:.60}. It must be a positive integer up to {MOST}."
                )
        rope = fields.get("rope_parameters") or {}
        theta = rope.get("rope_theta", 10000.0) if isinstance(rope, dict) else rope
        if type(theta) not in (int, float) or not 0 < theta <= 1e30:
            raise CheckpointError(f"{source}: vision_config.rope_parameters {rope!r:.60} have no positive rope_theta.")
        config = cls(**{name: fields[name] for name in names}, theta=float(theta))
        side = round(config.num_position_embeddings**0.5)
        supported = {
            "deepstack_visual_indexes": not fields.get("deepstack_visual_indexes"),
            "hidden_act": fields.get("hidden_act", ACTIVATION) == ACTIVATION,
            "out_hidden_size": config.out_hidden_size == hidden_size,
            "num_heads": config.hidden_size % (4 * config.num_heads) == 0,
            "num_position_embeddings": side * side == config.num_position_embeddings,
        }
        for name, fits in supported.items():
            if not fits:
                raise CheckpointError(
                    f"{source}: vision_config.{name} {fields[name]!r:.60} is not supported. "
                    "Use a Qwen3.5 checkpoint, or one without images."
                )
        return config

    @property
    def patch_values(self) -> int:
        """Values of a patch: channels, times, height and width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


class _Attention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def steps(self, x: mx.array, rotations: mx.array) -> Iterator[mx.array]:
        """Yield the attention of all patches `x [patches, hidden]` to each other, some queries at a time."""
        count, hidden = x.shape
        q, k, v = self.qkv(x).reshape(count, 3, self.heads, -1).transpose(1, 0, 2, 3)
        q, k, v = (t.transpose(1, 0, 2)[None] for t in (rotate(q, rotations), rotate(k, rotations), v))
        scale = (hidden // self.heads) ** -0.5
        tile = max(1, SCORE_BYTES // (4 * self.heads * count))
        for start in range(0, count, tile):
            out = mx.fast.scaled_dot_product_attention(q[:, :, start : start + tile], k, v, scale=scale)
            yield self.proj(out[0].transpose(1, 0, 2).reshape(-1, hidden))


class _MLP(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear_fc2(nn.gelu_approx(self.linear_fc1(x)))
        return y


class _Block(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.attn = _Attention(config)
        self.mlp = _MLP(config)

    def forward(self, x: mx.array, rotations: mx.array) -> mx.array:
        """Return `x [patches, hidden]` after the block. Every step is evaluated, so that others may run between."""
        parts = []
        for part in self.attn.steps(self.norm1(x), rotations):
            mx.eval(part)
            parts.append(part)
        x = x + mx.concatenate(parts)
        x = x + self.mlp(self.norm2(x))
        mx.eval(x)
        return x


class _Merger(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        merged = config.hidden_size * config.spatial_merge_size**2
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.linear_fc1 = nn.Linear(merged, merged)
        self.linear_fc2 = nn.Linear(merged, config.out_hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        merged = self.norm(x).reshape(-1, self.linear_fc1.weight.shape[1])
        y: mx.array = self.linear_fc2(nn.gelu(self.linear_fc1(merged)))
        return y


class VisionTower(nn.Module):
    """The tower. Not safe for several threads."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Linear(config.patch_values, config.hidden_size)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = [_Block(config) for _ in range(config.depth)]
        self.merger = _Merger(config)

    def rows(self, patches: np.ndarray[Any, Any], height: int, width: int) -> mx.array:
        """Return the evaluated rows `[patches / merge², out_hidden_size]` of one image.

        `patches [height x width, values]` are in the order of transformers' image processor: merged blocks row by row,
        and the patches of a block row by row. All times of a patch are equal.
        """
        x = self.patch_embed.proj(self._spread(patches).astype(self.pos_embed.weight.dtype))
        places = _places(height, width, self.config.spatial_merge_size)
        x = x + self._learned_positions(places, (height, width)).astype(x.dtype)
        rotations = self._rotations(places)
        for block in self.blocks:
            x = block.forward(x, rotations)
        rows: mx.array = self.merger(x)
        mx.eval(rows)
        return rows

    def _spread(self, patches: np.ndarray[Any, Any]) -> mx.array:
        """Return `patches` as one array. Only the first of the equal times of an image is copied.

        A copy from numpy holds Python's lock: 100 MB at once stopped the streams beside it for 50 ms on an H200.
        """
        config, count = self.config, len(patches)
        once = patches.reshape(count, config.in_channels, config.temporal_patch_size, -1)[:, :, 0]
        parts = []
        for part in np.array_split(np.ascontiguousarray(once), 1 + once.nbytes // COPY_BYTES):
            parts.append(mx.array(part))
            time.sleep(PAUSE_SECONDS)
        x = mx.concatenate(parts)[:, :, None]
        return mx.repeat(x, config.temporal_patch_size, axis=2).reshape(count, -1)

    def _learned_positions(self, places: tuple[np.ndarray[Any, Any], ...], sizes: tuple[int, int]) -> mx.array:
        """Return the square table of positions at `places`, stretched to `sizes`: bilinear, with equal corners."""
        side = round(self.config.num_position_embeddings**0.5)
        taps = [_taps(place, size, side) for place, size in zip(places, sizes, strict=True)]
        found = mx.zeros(())
        for row, row_weight in taps[0]:
            for column, column_weight in taps[1]:
                weight = mx.array((row_weight * column_weight).astype(np.float32))
                found = found + self.pos_embed(mx.array(row * side + column)) * weight[:, None]
        return found

    def _rotations(self, places: tuple[np.ndarray[Any, Any], ...]) -> mx.array:
        """Return cosines and sines, fp32 `[patches, 2, head_dim / 2]`: one half rotates by row, the other by column."""
        spatial = self.config.hidden_size // self.config.num_heads // 2
        rates = 1.0 / self.config.theta ** (mx.arange(0, spatial, 2, dtype=mx.float32) / spatial)
        angles = mx.concatenate([mx.array(place.astype(np.float32))[:, None] * rates for place in places], axis=1)
        return mx.stack([mx.cos(angles), mx.sin(angles)], axis=1)


def _places(height: int, width: int, merge: int) -> tuple[np.ndarray[Any, Any], ...]:
    """Return row and column of every patch, in the order of `VisionTower.rows`."""
    grid = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    rows, columns = grid.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return rows, columns


def _taps(place: np.ndarray[Any, Any], size: int, side: int) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return the two entries of a table of `side` that lie around each place of `size`, with their weights."""
    exact = place * ((side - 1) / max(1, size - 1))
    low = np.minimum(exact.astype(np.int64), side - 1)
    return [(low, 1 - (exact - low)), (np.minimum(low + 1, side - 1), exact - low)]


def has_tower(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint has the tensors and the config of a tower."""
    return checkpoint.config.vision is not None and bool(_stored_names(checkpoint))


def tower_bytes(checkpoint: Checkpoint) -> int:
    """Return the stored bytes of the tower, 0 without one."""
    if not has_tower(checkpoint):
        return 0
    return sum(checkpoint.tensors[name].nbytes for name in _stored_names(checkpoint).values())


def load_tower(checkpoint: Checkpoint, dtype: mx.Dtype | None) -> VisionTower:
    """Read the tower, in `dtype` or as it is stored. Raises CheckpointError for a missing or damaged tensor."""
    config = checkpoint.config
    assert config.vision is not None, "the checkpoint has a tower"
    source = checkpoint.path / "config.json"
    tower = VisionTower(VisionConfig.parse(source, config.vision, config.hidden_size))
    weights = tower_weights(checkpoint)
    if (kernel := weights.get(PATCHES)) is not None:
        if kernel.ndim == 5 and kernel.shape[1] != tower.config.in_channels:
            kernel = kernel.transpose(0, 4, 1, 2, 3)
        weights[PATCHES] = kernel.reshape(kernel.shape[0], -1)  # the convolution as a product
    try:
        tower.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint.path}: the tensors of the vision part do not fit vision_config: {error!s:.200}. "
            "Download the checkpoint again."
        ) from error
    if dtype is not None:
        tower.set_dtype(dtype)
    mx.eval(tower.parameters())
    return tower


def _stored_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the stored name of each tensor of the tower."""
    pairs = ((vision_name(name), name) for name in checkpoint.tensors)
    return {own: name for own, name in pairs if own is not None}


def tower_weights(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """Return the lazy weights by name, as they are stored. Those that mlx-vlm has quantized are plain again."""
    quantization = checkpoint.config.quantization or {}
    files: Files = {}
    names = _stored_names(checkpoint).items()
    found = {own: checkpoint.load_tensor(name, files) for own, name in names}
    for scales in [name for name in found if name.endswith(".scales")]:
        base = scales.removesuffix(".scales")
        group, bits = quantization.get("group_size", 64), quantization.get("bits", 4)
        parts = found.pop(f"{base}.weight"), found.pop(scales), found.pop(f"{base}.biases")
        found[f"{base}.weight"] = mx.dequantize(*parts, group_size=group, bits=bits)
    return found
