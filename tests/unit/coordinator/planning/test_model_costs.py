"""A checkpoint's costs for the planner, from its headers alone."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from coordinator.planning.capacity import EXPERT_SHARE, READ_TOKENS, REFERENCE_BANDWIDTH, model_costs
from mtp.checkpoint.format.checkpoint import Checkpoint
from tests.support.checkpoints.checkpoints import write_checkpoint


def test_dense_costs_add_up_to_the_files(tmp_path: Path) -> None:
    """Every byte of every part is counted once; a cast to float32 doubles the floats."""
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", tie=False, dtype=mx.bfloat16))
    costs = model_costs(checkpoint)
    sizes = checkpoint.part_bytes()
    total = sum(layer.weight_bytes for layer in costs.layers) + costs.embed_bytes + costs.last_stage_bytes
    assert total == sum(sizes.values())
    assert costs.lm_head_seconds == sizes["lm_head"] / REFERENCE_BANDWIDTH
    assert costs.draft_seconds == (sizes["lm_head"] + sizes["mtp"]) / REFERENCE_BANDWIDTH
    assert costs.last_stage_needs_embed
    config = checkpoint.config
    assert [layer.kv_bytes for layer in costs.layers[2:4]] == [0, 2 * 2 * config.num_kv_heads * config.head_dim]
    keys, _, values = config.family.segments(config.text_config)
    kernel, dim = (config.text_config[f"linear_{name}"] for name in ("conv_kernel_dim", "key_head_dim"))
    assert costs.layers[0].state_bytes == 2 * (kernel - 1) * (2 * keys + values) + 4 * values * dim
    wide = model_costs(checkpoint, dtype="float32")
    assert wide.embed_bytes == 2 * costs.embed_bytes
    assert wide.layers[3].kv_bytes == 2 * costs.layers[3].kv_bytes


def test_without_a_head_nothing_is_charged_for_one(tmp_path: Path) -> None:
    """A tied checkpoint without MTP needs the embedding on its last stage, and its drafts cost no time."""
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", tie=True, mtp=False))
    costs = model_costs(checkpoint)
    assert costs.draft_seconds == 0
    assert costs.head_kv_bytes == 0
    assert costs.last_stage_bytes == checkpoint.part_bytes()["norm"]
    assert costs.last_stage_needs_embed
    assert costs.lm_head_seconds == costs.embed_bytes / REFERENCE_BANDWIDTH


@pytest.mark.parametrize("fused", [True, False])
def test_only_active_experts_cost_time(tmp_path: Path, fused: bool) -> None:
    """All experts take memory; a token reads top-k of them (2 of 4 here), below the speed of other reads."""
    path = write_checkpoint(tmp_path / "m", moe=True, fused_experts=fused)
    checkpoint = Checkpoint.open(path)
    layer = model_costs(checkpoint).layers[0]
    part = {n for n in checkpoint.tensors if ".layers.0." in n and not n.startswith("mtp.")}
    experts = sum(checkpoint.tensors[n].nbytes for n in part if ".mlp.experts." in n)
    assert experts > 0
    assert layer.weight_bytes == checkpoint.part_bytes()["layers.0"]
    read = layer.weight_bytes - experts + experts / 2 / EXPERT_SHARE
    assert layer.seconds == pytest.approx(read / REFERENCE_BANDWIDTH, rel=1e-4)


def test_a_token_reads_the_keys_and_values_of_a_short_conversation(tmp_path: Path) -> None:
    """Only layers of attention have them."""
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m"))
    sizes, layers = checkpoint.part_bytes(), model_costs(checkpoint).layers
    assert {layer.kv_bytes > 0 for layer in layers} == {True, False}
    for number, layer in enumerate(layers):
        read = sizes[f"layers.{number}"] + READ_TOKENS * layer.kv_bytes
        assert layer.seconds == pytest.approx(read / REFERENCE_BANDWIDTH)


def test_quantized_kv_costs_its_bits_and_scales(tmp_path: Path) -> None:
    """Quantized K/V takes 8 bits per element, and a scale and a bias per group of 32 elements."""
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", dtype=mx.float16))
    elements = 2 * checkpoint.config.num_kv_heads * checkpoint.config.head_dim
    layer = model_costs(checkpoint, kv_bits=8).layers[3]
    assert layer.kv_bytes == elements + elements // 32 * 2 * 2


def test_packed_weights_are_not_cast(tmp_path: Path) -> None:
    """A dtype changes scales, biases and norms of a quantized checkpoint, not its packed weights."""
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", layout="mlx", quantize=4, dtype=mx.float16))
    stored = model_costs(checkpoint).layers[0].weight_bytes
    cast = model_costs(checkpoint, dtype="float32").layers[0].weight_bytes
    assert stored < cast < 1.7 * stored
