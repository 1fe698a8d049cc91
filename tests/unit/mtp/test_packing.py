"""Packed weights against the programs of their formats: the values, and the same codes in MLX's affine format.

The programs themselves made the weights (`make_goldens.py` at 15e3cf57). The metadata of the file has the oracle of
each case.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mtp.checkpoint.convert.foreign import Member, Members, affine_weight, packed_values
from tests.support.packed.goldens import Golden, read_goldens

GOLDENS = read_goldens()
REORDERED = GOLDENS.pop("gptq 4 bit symmetric desc_act")
INTEGERS = [name for name, golden in GOLDENS.items() if golden.form == "gptq"]


def values(golden: Golden) -> mx.array:
    return packed_values(golden.form, golden.members, golden.config)


@pytest.mark.parametrize("name", GOLDENS)
def test_the_values_are_those_of_the_oracle(name: str) -> None:
    """Every value has the bits that the program of the format computes, in the type in which it computes.

    ModelOpt multiplies the two scales of NVFP4 first, so float32 differs in the last bit there.
    """
    golden = GOLDENS[name]
    found = values(golden).astype(golden.values.dtype)
    if golden.name == "modelopt NVFP4":
        assert mx.allclose(found, golden.values, rtol=2**-23, atol=0)
    else:
        assert mx.array_equal(found, golden.values)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_keep_their_codes_and_scales(name: str) -> None:
    """In float16 the values are equal but for one rounding of the zero points."""
    golden = GOLDENS[name]
    found, form = affine_weight(golden.members, golden.config, mx.float16)
    scales, biases = (found[leaf].astype(mx.float32) for leaf in ("scales", "biases"))
    plain = mx.dequantize(found["weight"], scales, biases, dtype=mx.float32, **form)
    rounding = mx.finfo(mx.float16).eps / 2 * mx.abs(biases).max()
    assert mx.abs(plain - values(golden)).max() <= rounding


@pytest.mark.parametrize("name", ["gptq_v2 4 bit", "modelopt NVFP4", "modelopt FP8"])
def test_experts_are_read_one_by_one(name: str) -> None:
    """A stack of experts has each expert's own codes, scales and zero points."""
    golden = GOLDENS[name]
    factor: Member = "factor" if "factor" in golden.members else "scale"
    other = golden.members | {factor: golden.members[factor] * 2}
    members: Members = {m: mx.stack([array, other[m]]) for m, array in golden.members.items()}
    members.pop("order", None)
    found = packed_values(golden.form, members, golden.config)
    assert mx.array_equal(found[0], values(golden))
    assert mx.array_equal(found[1], values(golden) * 2)


def test_blocks_of_fp8_need_not_divide_the_weight() -> None:
    """The last blocks of rows and columns are cut to the weight."""
    codes = np.arange(30 * 50, dtype=np.uint8).reshape(30, 50) % 0x7F
    scale = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    members: Members = {"weight": mx.array(codes), "scale": mx.array(scale)}
    found = packed_values("fp8", members, {"weight_block_size": [16, 20]})
    plain = np.array(mx.from_fp8(mx.array(codes), mx.float32))
    expected = [[plain[r, c] * scale[r // 16, c // 20] for c in range(50)] for r in range(30)]
    assert np.array_equal(np.array(found), np.array(expected))
    for block in ([20, 16], ["large", 16], None):
        with pytest.raises(ValueError, match=r"do not fit|not two integers"):
            packed_values("fp8", members, {"weight_block_size": block})


def test_groups_and_bits_that_mlx_lacks_are_refused() -> None:
    """A group of 256 is split. A group of 16, 3 bits, and inputs in another order are refused."""

    def gptq(size: int, bits: int = 4) -> tuple[Members, dict[str, int]]:
        groups = 256 // size
        members: Members = {
            "weight": mx.zeros((256 * bits // 32, 64), mx.int32),
            "scale": mx.ones((groups, 64)),
            "zeros": mx.zeros((groups, 64 * bits // 32), mx.int32),
        }
        return members, {"bits": bits}

    assert affine_weight(*gptq(256), mx.float32)[1]["group_size"] == 128
    with pytest.raises(ValueError, match="groups of 16"):
        affine_weight(*gptq(16), mx.float32)
    with pytest.raises(ValueError, match="3 bits"):
        affine_weight(*gptq(128, 3), mx.float32)
    with pytest.raises(ValueError, match="desc_act"):
        values(REORDERED)
