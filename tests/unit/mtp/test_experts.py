"""Experts in fused products compute what mlx-lm's modules compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.qwen3_5 import SparseMoeBlock, TextModelArgs

from mtp.checkpoint.hub.published import FIELDS
from mtp.device import this_device
from mtp.glm_flash.args import GlmArgs
from mtp.glm_flash.family import GlmFlash
from mtp.glm_flash.modules import Experts
from mtp.layers.experts import FusedExperts, OrderedExperts, fuse_experts, highest, tiles_of


def block_of(
    bits: int | None,
    dtype: Any = mx.float32,
    experts: int = 16,
    inner: int = 64,
    *,
    equal: bool = False,
) -> Any:
    """Return the same random experts for each call. With `equal` a row has the same logit for all of them."""
    sizes: dict[str, Any] = {
        "num_experts": experts,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
    }
    args: Any = TextModelArgs(model_type="qwen3_5_moe_text", hidden_size=128, **sizes)
    args.norm_topk_prob = True
    mx.random.seed(1)
    block = SparseMoeBlock(args)
    if equal:
        block.gate.weight = mx.zeros_like(block.gate.weight)
    block.set_dtype(dtype)
    if bits is not None:
        nn.quantize(block, 64, bits)
    mx.eval(block.parameters())
    return block


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("rows", [1, 3, 8, 40])
def test_the_outputs_are_those_of_mlx_lm(bits: int | None, rows: int) -> None:
    """A few rows and a prompt have the same outputs, and those of a row do not depend on the others."""
    x = mx.random.normal((rows, 128), key=mx.random.key(2))
    stock, fused = block_of(bits), fuse_experts(block_of(bits))
    assert isinstance(fused, FusedExperts)
    found = fused(x)
    assert mx.allclose(found, stock(x), rtol=0.0, atol=1e-6)
    assert mx.array_equal(found, mx.concatenate([fused(x[i : i + 1]) for i in range(rows)]))


@pytest.mark.parametrize("rows", [1, 40])
def test_experts_of_several_formats_stay_apart(rows: int) -> None:
    """Those of GLM compute the same in their own modules as in fused products, with a correction and a limit."""
    args = GlmArgs.of(GlmFlash().named_fields(FIELDS["glm5_next"] | {"hidden_size": 64, "moe_intermediate_size": 32}))
    args = replace(args, limit=0.2, experts=replace(args.experts, count=16, chosen=4))
    mx.random.seed(1)
    block = Experts(args)
    block.gate.weight = mx.random.normal(block.gate.weight.shape)
    block.gate.e_score_correction_bias = mx.random.normal((16,)) * 0.2
    x = mx.random.normal((rows, 64))
    apart = block(x)
    mixed, fused = Experts(args), block.fused()
    assert isinstance(fused, FusedExperts)
    assert mx.allclose(fused(x), apart, rtol=0.0, atol=1e-6)
    mixed.switch_mlp.up_proj = mixed.switch_mlp.up_proj.to_quantized(32, 4)
    assert mixed.fused() is mixed
    assert mixed(x).shape == x.shape


def test_of_equal_logits_the_lower_expert_is_chosen() -> None:
    """The order does not depend on the device or on the rows beside one."""
    logits = mx.array([[1, 3, 2, 3, 3, 2, 1, 2]], mx.float32)
    for rows in (1, 32):
        chosen = highest(mx.broadcast_to(logits, (rows, 8)), 4)
        assert mx.sort(chosen, axis=-1).tolist() == [[1, 2, 3, 4]] * rows


@pytest.mark.parametrize("tile", [1, 2, 16])
@pytest.mark.parametrize("bits", [None, 4])
def test_tiles_of_rows_change_nothing(bits: int | None, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one expert that are multiplied together have the outputs that each has alone."""
    block, x = fuse_experts(block_of(bits)), mx.random.normal((40, 128), key=mx.random.key(3))
    alone = mx.concatenate([block(x[i : i + 1]) for i in range(40)])
    device = replace(this_device(), expert_tile=tile)
    monkeypatch.setattr("mtp.layers.experts.this_device", lambda: device)
    assert mx.allclose(block(x), alone, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("used", [1, 3, 16], ids=["one", "few", "all"])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_each_pair_has_a_place_in_a_tile_of_its_expert(rows: int, used: int) -> None:
    """Also where one expert has all pairs, and where some have none."""
    experts = mx.random.randint(16 - used, 16, (70,), key=mx.random.key(used))
    tiles, owners, places = tiles_of(experts, 16, rows)
    assert mx.array_equal(tiles.flatten()[places], mx.arange(70)), "so no two pairs share a place"
    assert mx.array_equal(mx.repeat(owners, rows)[places], experts)
    assert mx.array_equal(mx.sort(owners), owners)


@pytest.mark.parametrize("bits", [None, 4])
def test_the_reference_and_the_fused_experts_choose_alike(bits: int | None) -> None:
    """Experts of equal logits give both the same result, that of the lower experts."""
    x = mx.random.normal((3, 128), key=mx.random.key(4))
    own, fused = (
        OrderedExperts.of(block_of(bits, equal=True)),
        fuse_experts(block_of(bits, equal=True)),
    )
    first = own.shared_expert(x) * mx.sigmoid(own.shared_expert_gate(x))
    first = first + own.switch_mlp(x, mx.array([[0, 1, 2, 3]] * 3)).mean(axis=-2)
    assert mx.allclose(own(x), first, rtol=0.0, atol=1e-6)
    assert mx.allclose(fused(x), first, rtol=0.0, atol=1e-6)


def test_experts_of_several_formats_stay() -> None:
    """A conversion may store gate and up differently. Then mlx-lm's modules compute, and lose no weights."""
    block = block_of(4)
    plain = block_of(None)
    block.switch_mlp.up_proj = plain.switch_mlp.up_proj
    assert fuse_experts(block) is block
    assert "weight" in block.gate
    assert block(mx.ones((2, 128))).shape == (2, 128)


def test_a_dense_mlp_stays() -> None:
    """A module without experts is returned."""
    mlp = block_of(None).shared_expert
    assert fuse_experts(mlp) is mlp
