"""Tensor names: every published spelling maps to its parameter."""

from __future__ import annotations

import pytest

from mtp.checkpoint.format.names import Layout, Source, Transform, local_name, plan_part


@pytest.mark.parametrize(
    ("stored", "local"),
    [
        ("model.language_model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("language_model.model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("model.language_model.embed_tokens.weight", "embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("mtp.fc.weight", "mtp.fc.weight"),
        ("language_model.mtp.fc.weight", "mtp.fc.weight"),
        ("model.visual.blocks.0.norm1.weight", None),
        ("vision_tower.blocks.0.norm1.weight", None),
    ],
)
def test_every_prefix_leads_to_one_local_name(stored: str, local: str | None) -> None:
    """Raw, converted and text-only spellings of a tensor have the same local name; vision has none."""
    assert local_name(stored) == local


@pytest.mark.parametrize(
    ("part", "within", "transform"),
    [
        ("layers.0", "input_layernorm.weight", "norm + 1"),
        ("layers.0", "post_attention_layernorm.weight", "norm + 1"),
        ("layers.3", "self_attn.q_norm.weight", "norm + 1"),
        ("layers.3", "self_attn.k_norm.weight", "norm + 1"),
        ("norm", "weight", "norm + 1"),
        ("mtp", "norm.weight", "norm + 1"),
        ("mtp", "pre_fc_norm_embedding.weight", "norm + 1"),
        ("mtp", "pre_fc_norm_hidden.weight", "norm + 1"),
        ("mtp", "layers.0.self_attn.q_norm.weight", "norm + 1"),
        ("layers.0", "linear_attn.conv1d.weight", "conv1d"),
        ("layers.0", "linear_attn.norm.weight", "as stored"),
        ("layers.0", "linear_attn.A_log", "as stored"),
        ("layers.0", "mlp.up_proj.weight", "as stored"),
        ("embed", "weight", "as stored"),
        ("lm_head", "weight", "as stored"),
    ],
)
def test_raw_tensors_are_changed_and_converted_ones_are_not(
    part: str, within: str, transform: Transform
) -> None:
    """Raw norms but linear_attn.norm get +1, and conv1d is transposed; tensors in mlx layout stay as stored."""
    assert _plan(part, [within], "raw") == {within: Source((within,), transform)}
    assert _plan(part, [within], "mlx") == {within: Source((within,))}


def _plan(part: str, within: list[str], layout: Layout = "raw") -> dict[str, Source]:
    return plan_part(part, [(name, name) for name in within], layout, num_experts=2)


def test_unfused_experts_become_one_stack_in_order_of_expert() -> None:
    """Experts stored one by one become switch_mlp stacked in order, for any order of the names."""
    names = [f"mlp.experts.{e}.{p}_proj.weight" for e in (1, 0) for p in ("gate", "up", "down")]
    plan = _plan("layers.0", names)
    assert plan == {
        f"mlp.switch_mlp.{p}_proj.weight": Source(
            tuple(f"mlp.experts.{e}.{p}_proj.weight" for e in (0, 1)), "stack"
        )
        for p in ("gate", "up", "down")
    }


def test_fused_experts_are_split_gate_first() -> None:
    """`gate_up_proj` holds gate, then up; `down_proj` is used whole."""
    assert _plan(
        "mtp", ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"]
    ) == {
        "layers.0.mlp.switch_mlp.gate_proj.weight": Source(
            ("layers.0.mlp.experts.gate_up_proj",), "gate half"
        ),
        "layers.0.mlp.switch_mlp.up_proj.weight": Source(
            ("layers.0.mlp.experts.gate_up_proj",), "up half"
        ),
        "layers.0.mlp.switch_mlp.down_proj.weight": Source(("layers.0.mlp.experts.down_proj",)),
    }
