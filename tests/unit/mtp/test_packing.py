"""Packed weights against the programs of their formats.

The programs themselves made the weights (`make_goldens.py` at 15e3cf57). The metadata of the file has the oracle of
each case.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mtp.checkpoint.convert.foreign import Member, Members, packed_values
from tests.support.packed.goldens import Golden, read_goldens

GOLDENS = read_goldens()


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


@pytest.mark.parametrize("name", ["modelopt NVFP4", "modelopt FP8"])
def test_experts_are_read_one_by_one(name: str) -> None:
    """A stack of experts has each expert's own codes and scales."""
    golden = GOLDENS[name]
    factor: Member = "factor" if "factor" in golden.members else "scale"
    other = golden.members | {factor: golden.members[factor] * 2}
    members: Members = {m: mx.stack([array, other[m]]) for m, array in golden.members.items()}
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
