"""RoPE as cosines and sines of rows, for rows of images and for blocks of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from proto.images import ImageLayout

FIRST_POSITIONS = 4096
"""Positions. Length of the first table of RoPE, which doubles as texts grow."""


def rotate(x: mx.array, rotations: mx.array) -> mx.array:
    """Return `x [rows, heads, dim]` after RoPE by `rotations [rows, 2, half]`."""
    half = rotations.shape[-1]
    first, second = _rotated(x[..., :half], x[..., half : 2 * half], rotations[:, :1], rotations[:, 1:])
    parts = [first, second] if x.shape[-1] == 2 * half else [first, second, x[..., 2 * half :]]
    return mx.concatenate(parts, axis=-1).astype(x.dtype)


@partial(mx.compile, shapeless=True)
def _rotated(a: mx.array, b: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array]:
    return a * cos - b * sin, a * sin + b * cos


def rotation_table(rope: nn.RoPE, end: int) -> mx.array:
    """Return cosines and sines of at least `end` positions, fp32 `[positions, 2, half]`."""
    length = FIRST_POSITIONS
    while length < end:
        length *= 2
    return _table(rope.dims, rope.base, rope.scale, length)


@lru_cache(maxsize=4)
def _table(dims: int, base: float, scale: float, length: int) -> mx.array:
    """Return cosine and sine of each position and pair: MLX's RoPE of (1, 0)."""
    shape = (1, 1, length, dims // 2)
    unit = mx.concatenate([mx.ones(shape), mx.zeros(shape)], axis=-1)
    rotated = mx.fast.rope(unit, dims, traditional=False, base=base, scale=scale, offset=0)
    table = mx.contiguous(rotated.reshape(length, 2, dims // 2))
    mx.eval(table)
    return table


def image_rotations(rope: nn.RoPE, layout: ImageLayout, start: int, width: int) -> mx.array | None:
    """Return the rotations of `width` tokens from `start` on, fp32 `[width, 2, half]`, or None if all are text."""
    return _image_rotations(rope.dims, rope.base, rope.scale, layout, start, width)


@lru_cache(maxsize=8)
def _image_rotations(
    dims: int, base: float, scale: float, layout: ImageLayout, start: int, width: int
) -> mx.array | None:
    """Return what `image_rotations` does. All layers of a frame share it."""
    axes = layout.axes(start, width)
    if axes is None:
        return None
    rope = nn.RoPE(dims, base=base, scale=scale)
    table = rotation_table(rope, 1 + max(max(row) for row in axes))
    pairs = _axis_of_pairs(dims // 2, layout.sections)
    positions = mx.array(axes)[:, mx.array(pairs)]
    rotations = table.transpose(0, 2, 1)[positions, mx.arange(dims // 2)].transpose(0, 2, 1)
    mx.eval(rotations)
    return rotations


@dataclass(frozen=True)
class KernelRotations:
    """RoPE by a kernel that knows one position for each row. Rows of images get position 0, and rotate after it.

    `starts` are the first positions of the sequences' rows. `rotations [rows, 2, half]` leave text unchanged; None
    without images.
    """

    starts: tuple[int | None, ...]
    rotations: mx.array | None

    @classmethod
    def of(cls, rope: nn.RoPE, caches: Sequence[Any], widths: Sequence[int]) -> KernelRotations:
        """Return the rotations of sequences whose next `widths` rows run. `caches` are `KVRows`."""
        images = [cache.image_rotations(rope, n) for cache, n in zip(caches, widths, strict=True)]
        pairs = list(zip(caches, images, strict=True))
        starts = tuple(cache.position if rotations is None else None for cache, rotations in pairs)
        if all(rotations is None for rotations in images):
            return cls(starts, None)
        still = mx.concatenate([mx.ones((1, 1, rope.dims // 2)), mx.zeros((1, 1, rope.dims // 2))], 1)
        rows = [
            mx.repeat(still, n, axis=0) if rotations is None else rotations
            for rotations, n in zip(images, widths, strict=True)
        ]
        return cls(starts, mx.concatenate(rows))

    def places(self, widths: Sequence[int]) -> list[int]:
        """Return the position of each row for the kernel."""
        pairs = zip(self.starts, widths, strict=True)
        return [0 if start is None else start + i for start, n in pairs for i in range(n)]

    def rotate_new(self, q: mx.array, new: mx.array) -> tuple[mx.array, mx.array]:
        """Return `q [rows, heads, dim]` and `new [2, kv_heads, rows, dim]`, whose keys rotate too."""
        if self.rotations is None:
            return q, new
        keys = rotate(new[0].transpose(1, 0, 2), self.rotations).transpose(1, 0, 2)
        return rotate(q, self.rotations), mx.stack([keys, new[1]])


def _axis_of_pairs(pairs: int, sections: Sequence[int]) -> list[int]:
    """Return the axis of each pair: every third one rotations by height or width, as far as their sections reach.

    transformers: `Qwen3_5TextRotaryEmbedding.apply_interleaved_mrope`.
    """
    found = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(pairs, 3 * sections[axis]), 3):
            found[pair] = axis
    return found
