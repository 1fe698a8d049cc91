"""Integer weights of GPTQ, AWQ and compressed-tensors, as codes that MLX's affine format can hold.

MLX stores the codes of one output in one row, the first input in the lowest bits of a 32-bit word. A weight is
`scale * (code - zero)`. All functions take arrays with any leading dimensions, such as those of stacked experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from mtp.packing.packing import Packing

BITS = (2, 4, 8)
"""Sizes of an integer that never crosses a 32-bit word."""

_AWQ_SHIFTS = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 1, 2, 3)}
"""The place in a word of each of its outputs, in units of `bits`, by the size of an integer."""


@dataclass(frozen=True)
class Codes:
    """The codes `words [outputs, inputs * bits / 32]` of a weight, and per group of inputs a scale and a zero point.

    `scales` and `zeros` are `[outputs, groups]` in float32. `groups [inputs]` has the group of each input, None when
    the inputs of a group are adjacent.
    """

    words: mx.array
    bits: int
    scales: mx.array
    zeros: mx.array
    groups: mx.array | None = None

    @property
    def inputs(self) -> int:
        """Inputs of the weight."""
        count: int = self.words.shape[-1] * 32 // self.bits
        return count

    @property
    def group_size(self) -> int:
        """Inputs that share a scale. Raises ValueError when the groups do not divide the inputs."""
        groups = self.scales.shape[-1]
        if self.inputs % groups:
            raise ValueError(f"{groups} groups do not divide {self.inputs} inputs")
        return self.inputs // groups

    def values(self) -> mx.array:
        """Return the weight in float32."""
        codes = unpack_words(self.words, self.bits).astype(mx.float32)
        return self._wide(self.scales) * (codes - self._wide(self.zeros))

    def _wide(self, parameters: mx.array) -> mx.array:
        """Return parameters of groups for each input."""
        if self.groups is None:
            return mx.repeat(parameters, self.group_size, axis=-1)
        groups = mx.broadcast_to(self.groups[..., None, :], (*parameters.shape[:-1], self.inputs))
        return mx.take_along_axis(parameters, groups, axis=-1)

    def sort_inputs(self) -> tuple[mx.array, mx.array] | None:
        """Return words in which the inputs of each group are adjacent, and the inputs in their order.

        Returns None when groups have different sizes, or experts have different orders.
        """
        assert self.groups is not None
        if self.groups.ndim > 1:
            return None
        # A stable order, so that the same checkpoint always gives the same bits.
        places = mx.arange(self.inputs, dtype=mx.int32)
        order = mx.argsort(self.groups * self.inputs + places)
        if not mx.array_equal(self.groups[order], places // self.group_size).item():
            return None
        codes = mx.take(unpack_words(self.words, self.bits), order, axis=-1)
        return pack_words(codes, self.bits), order.astype(mx.uint32)


def read_codes(packing: Packing, members: dict[str, mx.array]) -> Codes:
    """Return the codes of a weight. Raises ValueError for members that do not fit together.

    The values of `order` are read at once, all other computations are lazy.
    """
    bits = packing.bits
    if bits not in BITS:
        raise ValueError(f"{bits} bits are not supported, only 2, 4 and 8")
    weight, scale = members["weight"], members["scale"].astype(mx.float32)
    zeros = members.get("zeros")
    match packing.form:
        case "gptq":
            words = mx.contiguous(_as_words(weight).swapaxes(-1, -2))
            scale = scale.swapaxes(-1, -2)
            zeros = unpack_words(_as_words(members["zeros"]), bits).swapaxes(-1, -2)
            zeros = zeros[..., : scale.shape[-2], :]
        case "awq":
            words = pack_words(_awq_codes(weight, bits).swapaxes(-1, -2), bits)
            scale = scale.swapaxes(-1, -2)
            zeros = _awq_codes(members["zeros"], bits).swapaxes(-1, -2)
        case "int8":
            bits = 8
            words = _signed(weight).view(mx.uint32)
            zeros = None if zeros is None else _signed(zeros)
        case _:
            words = _as_words(weight)
            if zeros is not None:
                across = _as_words(mx.contiguous(zeros.swapaxes(-1, -2)))
                zeros = unpack_words(across, bits).swapaxes(-1, -2)[..., : scale.shape[-2], :]
    if zeros is None:
        zeros = mx.full(scale.shape, 1 << (bits - 1), mx.float32)
    else:
        offset = mx.array(packing.zero_offset, mx.uint8)
        zeros = ((zeros + offset) & ((1 << bits) - 1)).astype(mx.float32)
    scale = mx.broadcast_to(scale, (*words.shape[:-1], scale.shape[-1]))
    zeros = mx.broadcast_to(zeros, scale.shape)
    codes = Codes(words, bits, scale, zeros)
    return _with_groups(codes, members["order"]) if "order" in members else codes


def _with_groups(codes: Codes, groups: mx.array) -> Codes:
    """Return the codes with the group of each input, unless the inputs of all groups are adjacent."""
    groups = groups.astype(mx.int32)
    adjacent = mx.arange(codes.inputs, dtype=mx.int32) // codes.group_size
    if mx.array_equal(groups, mx.broadcast_to(adjacent, groups.shape)).item():
        return codes
    if groups.shape[-1] != codes.inputs or mx.any(groups >= codes.scales.shape[-1]).item():
        raise ValueError("the groups of the inputs (g_idx) do not fit the scales")
    return replace(codes, groups=groups)


def unpack_words(words: mx.array, bits: int) -> mx.array:
    """Return the codes of `words [..., n]` as uint8 `[..., n * 32 / bits]`."""
    data = mx.contiguous(words).view(mx.uint8)
    if bits == 8:
        return data
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    codes = (data[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(*data.shape[:-1], -1)


def pack_words(codes: mx.array, bits: int) -> mx.array:
    """Return the words of uint8 `codes`; the inverse of `unpack_words`."""
    data = mx.contiguous(codes)
    if bits < 8:
        each = 8 // bits
        data = data.reshape(*data.shape[:-1], -1, each)
        packed = data[..., 0]
        for place in range(1, each):
            packed = packed | (data[..., place] << (place * bits))
        data = packed
    return mx.contiguous(data).view(mx.uint32)


def _as_words(values: mx.array) -> mx.array:
    return values.view(mx.uint32)


def _signed(values: mx.array) -> mx.array:
    """Return signed bytes as codes that begin at 0."""
    return mx.contiguous(values).view(mx.uint8) ^ 0x80


def _awq_codes(packed: mx.array, bits: int) -> mx.array:
    """Return the codes of `packed [..., n]`, whose words hold adjacent outputs in AWQ's order."""
    if bits not in _AWQ_SHIFTS:
        raise ValueError(f"AWQ with {bits} bits is not supported, only 4 and 8")
    codes = unpack_words(_as_words(packed), bits)
    each = 32 // bits
    places = mx.array(_AWQ_SHIFTS[bits])
    codes = codes.reshape(*packed.shape, each)
    return mx.take(codes, places, axis=-1).reshape(*packed.shape[:-1], -1)
