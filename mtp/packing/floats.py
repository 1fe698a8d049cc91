"""Small floating-point weights: FP8, NVFP4, MXFP4 and MXFP8, decoded in plain arithmetic.

`from_fp8` decodes E4M3. A nibble of E2M1 has its sign in the highest bit. A byte of E8M0 is the exponent of a power of
two, plus 127. All functions take arrays with any leading dimensions.
"""

from __future__ import annotations

import mlx.core as mx

from mtp.packing.packing import Packing

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

NVFP4_GROUP, MX_GROUP = 16, 32
"""Values that share a scale."""

MANTISSA_BITS = 23
"""Bits of the fraction of a float32."""


def fp8_values(packing: Packing, members: dict[str, mx.array]) -> mx.array:
    """Return an FP8 weight in float32. Raises ValueError when scales and weight do not fit."""
    values = mx.from_fp8(_bytes(members["weight"]), mx.float32)
    return values * wide_scales(packing, fp8_scales(members), values.shape)


def fp8_scales(members: dict[str, mx.array]) -> mx.array:
    """Return the scales of an FP8 weight in float32; bytes are E8M0."""
    scale = members["scale"]
    return e8m0_values(scale) if scale.dtype == mx.uint8 else scale.astype(mx.float32)


def wide_scales(packing: Packing, scale: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Return `scale` so that it multiplies a weight of `shape`: per tensor, per row or per block."""
    rows, columns = shape[-2:]
    if scale.shape[-1] == 1 and scale.shape[-2] in (1, rows):
        return scale
    block = packing.block
    if block is None or scale.shape[-2:] != (-(-rows // block[0]), -(-columns // block[1])):
        raise ValueError(
            f"FP8 scales of shape {scale.shape} do not fit a weight of {shape} in blocks of {block}"
        )
    wide = mx.repeat(mx.repeat(scale, block[0], axis=-2), block[1], axis=-1)
    return wide[..., :rows, :columns]


def fp4_values(weight: mx.array, scales: mx.array) -> mx.array:
    """Return E2M1 values `weight [..., n / 2]`, two per byte, times a float32 scale per group."""
    data = _bytes(weight)
    codes = mx.stack([data & 0x0F, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
    table = mx.array([*_E2M1, *(-value for value in _E2M1)], mx.float32)
    group, rest = divmod(codes.shape[-1], scales.shape[-1])
    if rest:
        raise ValueError(f"{scales.shape[-1]} scales do not divide {codes.shape[-1]} values")
    return table[codes] * mx.repeat(scales, group, axis=-1)


def e8m0_values(scale: mx.array) -> mx.array:
    """Return scales of E8M0 bytes in float32."""
    return (_bytes(scale).astype(mx.uint32) << MANTISSA_BITS).view(mx.float32)


def split_powers(scale: mx.array) -> tuple[mx.array, mx.array]:
    """Return positive float32 scales as E8M0 bytes and factors from 1 to below 2."""
    pattern = scale.astype(mx.float32).view(mx.uint32)
    fraction = pattern & ((1 << MANTISSA_BITS) - 1)
    power = (pattern >> MANTISSA_BITS).astype(mx.uint8)
    return power, (fraction | (127 << MANTISSA_BITS)).view(mx.float32)


def _bytes(values: mx.array) -> mx.array:
    return mx.contiguous(values).view(mx.uint8)
