"""The format of a stored weight, against mlx-lm's own rule."""

from __future__ import annotations

from dataclasses import asdict

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import infer_quant_config

from mtp.layers.linear import Format

AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
OTHERS = [("nvfp4", 4, 16), ("mxfp4", 4, 32), ("mxfp8", 8, 32)]


@pytest.mark.parametrize(("mode", "bits", "group"), AFFINE + OTHERS)
def test_the_format_of_a_stored_weight_is_that_of_mlx_lm(mode: str, bits: int, group: int) -> None:
    layer = nn.Linear(256, 64, bias=False)
    packed = layer.to_quantized(group_size=group, bits=bits, mode=mode)
    stored = {f"a.{name}": value for name, value in packed.parameters().items()}
    found = Format.stored(stored["a.weight"], stored["a.scales"], 256)
    assert asdict(found) == infer_quant_config("a", layer, stored)
    assert found == Format(bits, group, mode)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="8 bits in groups of 16"):
        Format.stored(mx.zeros((4, 64), mx.uint32), mx.zeros((4, 16), mx.uint8), 256)
