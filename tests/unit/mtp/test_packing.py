"""Packed weights against the programs of their formats: the values, and the same bits in MLX's formats.

`tests/support/packed/make_goldens.py` made the weights. The oracle of each case is in the metadata of its file.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from mtp.checkpoint.convert.foreign import (
    Members,
    Packing,
    Repacked,
    pack_words,
    packed_values,
    repack,
    unpack_words,
)
from tests.support.packed.goldens import Golden, read_goldens

GOLDENS = read_goldens()

DEQUANTIZED = {
    "compressed-tensors FP8_DYNAMIC",
    "compressed-tensors FP8",
    "compressed-tensors FP8_BLOCK",
    "compressed-tensors NVFP4A16",
    "modelopt NVFP4",
    "modelopt FP8",
    "FP8 in blocks",
    "gptq_v2 4 bit symmetric desc_act",
    "gptq 4 bit symmetric desc_act",
    "gptq_v2 4 bit desc_act",
}
"""The cases that no format of MLX holds."""

REPACKED = [name for name in GOLDENS if name not in DEQUANTIZED]


def exact(found: Repacked) -> mx.array:
    """Return the values of a repacked weight in float32, computed from float32 scales."""
    scales, biases = found.parameters["scales"], found.parameters.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    weight = found.parameters["weight"]
    values: mx.array = mx.dequantize(weight, scales, biases, dtype=mx.float32, **found.form)
    return values


def repacked(golden: Golden) -> Repacked:
    """Return the repacked weight of a case that MLX has a format for."""
    found = repack(golden.packing, golden.members, golden.values.dtype)
    assert found is not None
    return found


@pytest.mark.parametrize("name", GOLDENS)
def test_the_values_are_those_of_the_oracle(name: str) -> None:
    """Every value has the bits that the program of the format computes, in the type in which it computes.

    ModelOpt multiplies the two scales of NVFP4 first, so float32 differs in the last bit there.
    """
    golden = GOLDENS[name]
    values = packed_values(golden.packing, golden.members).astype(golden.values.dtype)
    if golden.name == "modelopt NVFP4":
        assert mx.allclose(values, golden.values, rtol=2**-23, atol=0)
    else:
        assert mx.array_equal(values, golden.values)


@pytest.mark.parametrize("name", REPACKED)
def test_repacked_weights_have_the_same_values(name: str) -> None:
    """A repacked weight keeps codes and scales: the values are equal in float32, zero points within one rounding."""
    golden = GOLDENS[name]
    found = repacked(golden)
    reference = packed_values(golden.packing, golden.members)
    biases = found.parameters.get("biases")
    if biases is None or symmetric(golden):
        assert mx.array_equal(exact(found), reference)
    else:
        rounding = mx.finfo(biases.dtype).eps / 2 * mx.abs(biases).max()
        assert mx.abs(exact(found) - reference).max() <= rounding


def symmetric(golden: Golden) -> bool:
    """Return whether all zero points are in the middle, so that a bias is a power of two times its scale."""
    groups = golden.config.get("config_groups", {}).get("group_0", {}).get("weights", {})
    return bool(golden.config.get("sym", groups.get("symmetric", False)))


def test_formats_without_a_grid_in_mlx_are_dequantized() -> None:
    """Scales per tensor, per row or per block, and inputs out of order have no format of MLX. All others have one."""
    lost = {name for name, g in GOLDENS.items() if repack(g.packing, g.members, mx.float32) is None}
    assert lost == DEQUANTIZED


@pytest.mark.parametrize("scale", [(), (1,), (32,), (32, 1)], ids=str)
def test_powers_of_two_make_mxfp8(scale: tuple[int, ...]) -> None:
    """FP8 per tensor or row keeps its bits as MXFP8 if its scales are powers of two."""
    golden = GOLDENS["compressed-tensors FP8_DYNAMIC"]
    powers = mx.full(scale, 0.25)
    members = golden.members | {"scale": powers.reshape(*scale, *(1,) * (2 - len(scale)))}
    found = repack(golden.packing, members, mx.bfloat16)
    assert found is not None and found.form["mode"] == "mxfp8"
    assert mx.array_equal(exact(found), packed_values(golden.packing, members))


@pytest.mark.parametrize("name", ["compressed-tensors W4A16_ASYM", "awq 4 bit"])
def test_experts_are_repacked_one_by_one(name: str) -> None:
    """A stack of experts has each expert's own codes, scales and zero points."""
    golden = GOLDENS[name]
    other = golden.members | {"scale": golden.members["scale"] * 2}
    members: Members = {
        member: mx.stack([array, other[member]]) for member, array in golden.members.items()
    }
    found = repack(golden.packing, members, mx.float32)
    assert found is not None
    for expert, alone in enumerate((golden.members, other)):
        expected = repack(golden.packing, alone, mx.float32)
        assert expected is not None
        one = {leaf: array[expert] for leaf, array in found.parameters.items()}
        assert mx.array_equal(exact(replace(found, parameters=one)), exact(expected))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_words_and_codes_are_inverse(bits: int) -> None:
    """Codes survive packing, with the first in the lowest bits."""
    codes = mx.random.randint(0, 1 << bits, (3, 64), key=mx.random.key(bits)).astype(mx.uint8)
    words = pack_words(codes, bits)
    assert mx.array_equal(unpack_words(words, bits), codes)
    first = 0
    for place in range(32 // bits):
        first |= int(codes[0, place]) << (place * bits)
    assert int(words[0, 0]) == first


@pytest.mark.parametrize(("group", "expected"), [(16, None), (64, 64), (256, 128)])
def test_groups_that_mlx_lacks_are_not_repacked(group: int, expected: int | None) -> None:
    """A group of 16 has no affine format; a group of 64 is kept, and one of 256 is split."""
    members: Members = {
        "weight": mx.zeros((4, 256 * 4 // 32), mx.int32),
        "scale": mx.ones((4, 256 // group)),
        "shape": mx.array([4, 256]),
    }
    found = repack(Packing("words"), members, mx.float32)
    assert (None if found is None else found.form["group_size"]) == expected


def test_experts_with_different_orders_have_their_values() -> None:
    """desc_act of GPTQ orders the inputs of each expert by itself."""
    golden = GOLDENS["gptq_v2 4 bit desc_act"]
    flipped = golden.members | {"order": golden.members["order"][::-1]}
    members: Members = {
        name: mx.stack([array, flipped[name]]) for name, array in golden.members.items()
    }
    values = packed_values(golden.packing, members)
    assert mx.array_equal(values[0], packed_values(golden.packing, golden.members))
    assert mx.array_equal(values[1], packed_values(golden.packing, flipped))


def test_bits_that_cross_words_are_refused() -> None:
    """Integers of 3 bits are refused, because they cross the words."""
    golden = GOLDENS["gptq 4 bit"]
    members = golden.members | {"zeros": mx.zeros((4, 3), mx.int32)}
    with pytest.raises(ValueError, match="only 2, 4 and 8 bits"):
        repack(golden.packing, members, mx.float32)
