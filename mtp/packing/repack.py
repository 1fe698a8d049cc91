"""The values of a packed weight, and the same bits in a format of MLX.

`repack` keeps the codes and the scales of the source. `packed_values` is the plain reference beside it, which
`repacked_values` must equal. All are lazy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mtp.packing.floats import (
    MX_GROUP,
    e8m0_values,
    fp4_values,
    fp8_scales,
    fp8_values,
    split_powers,
    wide_scales,
)
from mtp.packing.integers import Codes, read_codes
from mtp.packing.packing import Packing

Members = dict[str, mx.array]

_AFFINE_GROUPS = (128, 64, 32)
"""Group sizes of MLX's affine format, the largest first, because larger groups need fewer scales."""


def packed_values(packing: Packing, members: Members) -> mx.array:
    """Return the weight `[outputs, inputs]` in float32. Raises ValueError for members that do not fit together."""
    weight, scale = members["weight"], members["scale"]
    match packing.form:
        case "fp8":
            return fp8_values(packing, members)
        case "mxfp8":
            wide = mx.repeat(e8m0_values(scale), MX_GROUP, axis=-1)
            return mx.from_fp8(weight, mx.float32) * wide
        case "mxfp4":
            return fp4_values(weight, e8m0_values(scale))
        case "nvfp4" | "nvfp4 divided":
            values = fp4_values(weight, mx.from_fp8(scale, mx.float32))
            return values * _global_scale(packing, members)
        case _:
            return read_codes(packing, members).values()


def repack(packing: Packing, members: Members, dtype: mx.Dtype) -> Members | None:
    """Return the weight in a format of MLX, or None when no format holds the same values.

    The result has `weight` and `scales`. The affine format adds `biases` and has both in `dtype`. `output_scale`
    multiplies the outputs and `input_order` reorders the inputs (see RepackedLinear). Raises ValueError for members
    that do not fit together.
    """
    weight, scale = members["weight"], members["scale"]
    match packing.form:
        case "fp8":
            return _repack_fp8(packing, members)
        case "mxfp8" | "mxfp4":
            return {"weight": _words(weight), "scales": scale.view(mx.uint8)}
        case "nvfp4" | "nvfp4 divided":
            return {
                "weight": _words(weight),
                "scales": scale,
                "output_scale": _global_scale(packing, members)[..., 0],
            }
        case _:
            return _repack_codes(read_codes(packing, members), dtype)


def repacked_values(parameters: Members, settings: Mapping[str, Any]) -> mx.array:
    """Return the values of a weight in a format of MLX in float32, computed from float32 scales.

    `settings` has its `bits`, `group_size` and `mode`. The inputs are in their natural order.
    """
    scales, biases = parameters["scales"], parameters.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    values: mx.array = mx.dequantize(
        parameters["weight"], scales, biases, dtype=mx.float32, **settings
    )
    if "output_scale" in parameters:
        scale = parameters["output_scale"]
        values = values * (scale if scale.ndim == values.ndim else scale[..., None])
    if "input_order" in parameters:
        values = mx.take(values, mx.argsort(parameters["input_order"]), axis=-1)
    return values


def _repack_codes(codes: Codes, dtype: mx.Dtype) -> Members | None:
    size = codes.group_size
    group = next((group for group in _AFFINE_GROUPS if size % group == 0), None)
    if group is None:
        return None
    sorted_inputs = None if codes.groups is None else codes.sort_inputs()
    if codes.groups is not None and sorted_inputs is None:
        return None
    words, order = sorted_inputs or (codes.words, None)
    # The scale is rounded before the bias is computed, so that a code at the zero point stays near 0.
    scales = codes.scales.astype(dtype)
    biases = (-codes.zeros * scales.astype(mx.float32)).astype(dtype)
    if size != group:
        scales, biases = (mx.repeat(part, size // group, axis=-1) for part in (scales, biases))
    found = {"weight": words, "scales": mx.contiguous(scales), "biases": mx.contiguous(biases)}
    return found if order is None else {**found, "input_order": order}


def _repack_fp8(packing: Packing, members: Members) -> Members | None:
    """Return FP8 as MXFP8: a power of two per group, and the rest of a scale per row beside it."""
    weight, scale = members["weight"], fp8_scales(members)
    rows, columns = weight.shape[-2:]
    if columns % MX_GROUP:
        return None
    power, factor = split_powers(scale)
    if scale.shape[-1] == 1 and scale.shape[-2] in (1, rows):
        shape = (*weight.shape[:-1], columns // MX_GROUP)
        scales = mx.contiguous(mx.broadcast_to(power, shape))
        per_tensor = factor.shape[-2] == 1
        factor = factor[..., 0] if per_tensor else factor
        return {"weight": _words(weight), "scales": scales, "output_scale": factor}
    if not packing.powers or packing.block is None or packing.block[1] % MX_GROUP:
        return None
    if not mx.all(factor == 1).item():
        raise ValueError("the FP8 scales are not powers of two, but config.json says so")
    wide = wide_scales(packing, power, weight.shape)
    return {"weight": _words(weight), "scales": mx.contiguous(wide[..., ::MX_GROUP])}


def _global_scale(packing: Packing, members: Members) -> mx.array:
    """Return the factor of a whole NVFP4 weight in float32."""
    scale = members["global_scale"].astype(mx.float32)
    return 1 / scale if packing.form == "nvfp4 divided" else scale


def _words(data: mx.array) -> mx.array:
    return mx.contiguous(data).view(mx.uint32)
