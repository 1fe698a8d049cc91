"""Packed weights against the programs of their formats: the values, and the same bits in MLX's formats.

`tests/support/packed/make_goldens.py` made the weights. The oracle of each case is in the metadata of its file.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchLinear

from mtp.kernels.packed_linear import can_pack
from mtp.packing.integers import pack_words, unpack_words
from mtp.packing.packing import Packing
from mtp.packing.repack import Members, packed_values, repack, repacked_values
from mtp.packing.repacked_linear import add_extras
from tests.support.packed.goldens import Golden, read_goldens

GOLDENS = read_goldens()

REQUANTIZED = {"compressed-tensors FP8_BLOCK", "FP8 in blocks"}
"""The cases that no format of MLX holds."""

MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}


REPACKED = [name for name in GOLDENS if name not in REQUANTIZED]


def settings(inputs: int, packed: Members) -> dict[str, Any]:
    """Return the settings of a weight in a format of MLX, from its shapes."""
    bits = packed["weight"].shape[-1] * 32 // inputs
    group = inputs // packed["scales"].shape[-1]
    mode = "affine" if "biases" in packed else MODES[bits, group]
    return {"group_size": group, "bits": bits, "mode": mode}


def exact(inputs: int, packed: Members) -> mx.array:
    """Return the values of a repacked weight in float32."""
    return repacked_values(packed, settings(inputs, packed))


def repacked(golden: Golden) -> Members:
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
    values = exact(reference.shape[-1], found)
    if "biases" not in found or symmetric(golden):
        assert mx.array_equal(values, reference)
    else:
        rounding = mx.finfo(found["biases"].dtype).eps / 2 * mx.abs(found["biases"]).max()
        assert mx.abs(values - reference).max() <= rounding


def symmetric(golden: Golden) -> bool:
    """Return whether all zero points are in the middle, so that a bias is a power of two times its scale."""
    groups = golden.config.get("config_groups", {}).get("group_0", {}).get("weights", {})
    return bool(golden.config.get("sym", groups.get("symmetric", False)))


def test_only_blocks_of_fp8_are_requantized() -> None:
    """Every other format keeps its bits."""
    lost = {name for name, g in GOLDENS.items() if repack(g.packing, g.members, mx.float32) is None}
    assert lost == REQUANTIZED


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("name", REPACKED)
def test_a_layer_computes_with_a_repacked_weight(name: str, dtype: mx.Dtype) -> None:
    """The outputs are those of the dequantized weight, within the rounding of the type."""
    golden = GOLDENS[name]
    found = repacked(golden)
    outputs, inputs = golden.values.shape
    module = nn.Module()
    module.layer = nn.Linear(inputs, outputs, bias=False)
    nn.quantize(module, **settings(inputs, found))
    stored = {f"layer.{leaf}": array for leaf, array in found.items()}
    add_extras(module, stored)
    module.load_weights(list(stored.items()))
    module.apply(lambda a: a.astype(dtype) if a.dtype in (mx.float16, mx.bfloat16) else a)
    x = mx.random.normal((3, inputs), key=mx.random.key(0)).astype(dtype)
    expected = x.astype(mx.float32) @ exact(inputs, found).T
    y = module.layer(x)
    # A group's scale and bias are rounded to the type, and so are products on the CPU.
    tolerance = {mx.float32: 1e-4, mx.float16: 8e-3, mx.bfloat16: 4e-2}[dtype]
    assert y.dtype == dtype
    assert mx.abs(y.astype(mx.float32) - expected).max() <= tolerance * mx.abs(expected).max()


@pytest.mark.parametrize("name", ["compressed-tensors FP8_DYNAMIC", "modelopt NVFP4"])
def test_experts_have_their_own_scales(name: str) -> None:
    """A stack of experts gives each expert's outputs with its own factors."""
    golden = GOLDENS[name]
    members = {
        member: mx.stack([array, array[::-1] if array.shape[0] > 1 else array * 2])
        for member, array in golden.members.items()
    }
    found = repack(golden.packing, members, mx.float32)
    assert found is not None
    _, outputs, inputs = values_shape = packed_values(golden.packing, members).shape
    module = nn.Module()
    module.layer = SwitchLinear(inputs, outputs, values_shape[0], bias=False)
    nn.quantize(module, **settings(inputs, found))
    stored = {f"layer.{leaf}": array for leaf, array in found.items()}
    add_extras(module, stored)
    module.load_weights(list(stored.items()))
    x = mx.random.normal((3, 1, 1, inputs), key=mx.random.key(0))
    y = module.layer(x, mx.array([[0, 1], [1, 0], [1, 1]]))
    each = x.squeeze(1) @ packed_values(golden.packing, members).swapaxes(-1, -2)[:, None]
    for row, experts in enumerate(((0, 1), (1, 0), (1, 1))):
        for place, expert in enumerate(experts):
            expected = each[expert, row]
            assert mx.abs(y[row, place] - expected).max() <= 1e-4 * mx.abs(expected).max()


def test_a_layer_with_extras_is_not_packed_for_cuda() -> None:
    """The kernels for CUDA know neither a scale of the outputs nor an order of the inputs."""
    module = nn.Module()
    module.layer = nn.QuantizedLinear(64, 16, bias=False)
    module.layer.set_dtype(mx.float16)
    assert can_pack([module.layer])
    add_extras(module, {"layer.input_order": mx.arange(64)})
    module.layer.set_dtype(mx.float16)
    assert not can_pack([module.layer])


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


def test_groups_that_mlx_lacks_are_not_repacked() -> None:
    """A group of 16 has no affine format; a group of 64 is split no further than needed, one of 256 is."""
    weight = mx.zeros((4, 256 * 4 // 32), mx.int32)
    for group, expected in ((16, None), (64, 64), (256, 128), (96, None)):
        if 256 % group:
            continue
        members = {"weight": weight, "scale": mx.ones((4, 256 // group))}
        found = repack(Packing("packed integers"), members, mx.float32)
        assert (None if found is None else 256 // found["scales"].shape[-1]) == expected


def test_experts_with_different_orders_are_dequantized() -> None:
    """A layer of experts has one order of inputs, so desc_act with other orders is not repacked, but has its values."""
    golden = GOLDENS["gptq_v2 4 bit desc_act"]
    flipped = golden.members | {"order": golden.members["order"][::-1]}
    members = {name: mx.stack([array, flipped[name]]) for name, array in golden.members.items()}
    assert repack(golden.packing, members, mx.float32) is None
    values = packed_values(golden.packing, members)
    assert mx.array_equal(values[0], packed_values(golden.packing, golden.members))
    assert mx.array_equal(values[1], packed_values(golden.packing, flipped))


def test_scales_that_are_no_powers_of_two_are_refused() -> None:
    """A config that promises powers of two is checked, because a wrong one would change every value."""
    golden = GOLDENS["FP8 in blocks"]
    packing = Packing("fp8", 8, golden.packing.block, powers=True)
    with pytest.raises(ValueError, match="not powers of two"):
        repack(packing, golden.members, mx.float32)
