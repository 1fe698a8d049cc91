"""A small random GLM-5.3-Flash checkpoint, whose backbone is transformers' own, with an MTP head."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mtp.glm_flash.family import GlmFlash
from tests.support.checkpoints.checkpoints import edit_config, edit_tensors

VOCAB = 256

EOS = VOCAB - 1

TEXT: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "swiglu_limit": 1.5,  # so that it binds
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": [EOS],
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 0,
    "v_head_dim": 24,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 64,
    "index_kpool": 4,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "linear_attn_config": {
        "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
        "kda_layers": [0, 1, 2, 4, 5, 6], "full_attn_layers": [3, 7],
    },
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "mhc": True,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
}  # fmt: skip

LAYERS = ["linear_attention", "linear_attention", "linear_attention", "deepseek_sparse_attention"] * 2

_VISION = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "projection_intermediate_size": 48,
    "out_hidden_size": 64, "image_size": 56, "patch_size": 14,
}  # fmt: skip


def reference_model(text: dict[str, Any], seed: int = 0) -> Any:
    """Return transformers' model with random weights. It needs torch."""
    import torch
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    chance = torch.Generator().manual_seed(seed)
    fields = {name: value for name, value in text.items() if name != "model_type"}
    fields |= {"layer_types": LAYERS, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6, "pad_token_id": 0}
    images: dict[str, Any] = {
        "image_token_id": 1,
        "video_token_id": 2,
        "image_start_token_id": 3,
        "image_end_token_id": 4,
    }
    config = Glm5NextConfig(text_config=json.loads(json.dumps(fields)), vision_config=_VISION, **images)
    config._attn_implementation = "eager"
    model = Glm5NextForConditionalGeneration(config).float().eval()
    corrections = [(n, b) for n, b in model.named_buffers() if "e_score" in n]
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *corrections]:
            value.copy_(_spread(name, torch.randn(value.shape, generator=chance)))
    return model


def _spread(name: str, drawn: Any) -> Any:
    """Return normal values of a parameter so that every mechanism matters: gates are open, norms are no ones."""
    if name.endswith(("A_log", "base", "conv1d.weight")):
        return 0.5 * drawn
    if name.endswith("dt_bias"):
        return drawn - 1.0
    if name.endswith(("e_score_correction_bias", "k_norm.bias")):
        return 0.2 * drawn
    if name.endswith(("compress_ape", "embed_tokens.weight")):
        return drawn
    return 1 + 0.2 * drawn if drawn.ndim == 1 else drawn * drawn.shape[-1] ** -0.5


def write_glm_flash(path: Path, model: Any, text: dict[str, Any], *, mtp: bool = True) -> Path:
    """Write the weights of transformers' `model` by their published names, with a random head. Return `path`."""
    model.save_pretrained(path)
    added = head_weights(text) if mtp else {}
    edit_tensors(path, lambda weights: weights.update(added))
    edit_config(path, lambda config: config["text_config"].update(text, layer_types=LAYERS))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    return path


_PUBLISHED = (
    (re.compile(r"^fc\b"), "eh_proj"),
    (re.compile(r"^pre_fc_norm_embedding\b"), "enorm"),
    (re.compile(r"^pre_fc_norm_hidden\b"), "hnorm"),
    (re.compile(r"^norm\b"), "shared_head.norm"),
    (re.compile(r"^layers\.0\."), ""),
)


def head_weights(text: dict[str, Any]) -> dict[str, mx.array]:
    """Return the tensors of a random head by their published names, as those of one more layer."""
    mx.random.seed(5)
    family = GlmFlash()
    parameters: Any = tree_flatten(family.head(family.named_fields(text)).parameters())
    found: dict[str, mx.array] = {}
    for name, value in parameters:
        for ours, theirs in _PUBLISHED:
            name = ours.sub(theirs, name)
        drawn: mx.array = _spread(name, mx.random.normal(value.shape))
        if ".switch_mlp." not in name:
            found[f"model.language_model.layers.{text['num_hidden_layers']}.{name}"] = drawn
            continue
        for expert in range(value.shape[0]):
            one = name.replace("switch_mlp", f"experts.{expert}")
            found[f"model.language_model.layers.{text['num_hidden_layers']}.{one}"] = drawn[expert]
    mx.eval(found)
    return found
