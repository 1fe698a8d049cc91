"""A small random Flash-Next checkpoint, whose backbone is transformers' own, with an MTP head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

VOCAB = 256

TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "output_gate_type": "sigmoid",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 16,
    "ple_layer_ids": [2],
    "ple_embed_dim": 32,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 97,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "indexer_n_heads": 12,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": VOCAB - 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}


def text_config(layers: int = 8, **fields: Any) -> dict[str, Any]:
    """Return the text config of a model of `layers` layers."""
    kinds = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
    return {**TEXT, "num_hidden_layers": layers, "layer_types": kinds, **fields}


def reference_model(text: dict[str, Any], seed: int = 0) -> Any:
    """Return transformers' model with random weights. It needs torch."""
    import torch
    from transformers.models.qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    torch.manual_seed(seed)
    fields = {name: value for name, value in text.items() if name != "model_type"}
    config = Qwen4ExpTextConfig(**json.loads(json.dumps(fields)))
    config._attn_implementation = "eager"
    model = Qwen4ExpForCausalLM(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 1:  # norms far from 0, decays of all lengths
                low, high = (-2.0, 2.0) if name.endswith(("A_log", "dt_bias")) else (-0.4, 0.4)
                value.uniform_(low, high)
                if name.endswith("linear_attn.norm.weight"):
                    value.add_(1.0)
            elif value.ndim == 2 and "ngram_embedding" not in name:
                value.normal_(0.0, value.shape[-1] ** -0.5)
            elif "ngram_embedding" not in name:
                value.normal_(0.0, 0.3)
            else:
                value.normal_()
    return model


def write_flash_next(path: Path, model: Any, text: dict[str, Any], *, mtp: bool = True) -> Path:
    """Write the weights of transformers' `model` as they are published, with a random head. Return `path`."""
    path.mkdir(parents=True, exist_ok=True)
    weights: dict[str, mx.array] = {}
    for name, value in model.state_dict().items():
        array = mx.array(value.float().numpy() if value.is_floating_point() else value.numpy())
        if name.endswith("ngram_embedding.weight"):
            parts = np.array_split(np.arange(array.shape[0]), text["split_ngram_parts"])
            base = name.removesuffix("weight").replace("model.", "model.language_model.", 1)
            for number, rows in enumerate(parts):
                weights[f"{base}shard_{number}.weight"] = array[mx.array(rows)]
            continue
        weights[name.replace("model.", "model.language_model.", 1)] = array
    weights |= head_weights(text) if mtp else {}
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "pt"})
    config: dict[str, Any] = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
    }
    config |= {"tie_word_embeddings": text["tie_word_embeddings"], "text_config": text}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB - 1]}))
    return path


def head_weights(text: dict[str, Any]) -> dict[str, mx.array]:
    """Return the tensors of a random head, named and shaped as in the published checkpoint."""
    from mlx.utils import tree_flatten

    from mtp.flash_next.family import FlashNext

    mx.random.seed(5)
    found: dict[str, mx.array] = {}
    parameters: Any = tree_flatten(FlashNext().head(dict(text)).parameters())
    for name, value in parameters:
        if value.ndim == 1:
            found[f"mtp.{name}"] = mx.random.uniform(-0.4, 0.4, value.shape)
        else:
            found[f"mtp.{name}"] = mx.random.normal(value.shape, scale=value.shape[-1] ** -0.5)
    for base in [n.removesuffix("gate_proj.weight") for n in found if "switch_mlp.gate" in n]:
        fused = [found.pop(f"{base}{kind}_proj.weight") for kind in ("gate", "up")]
        experts = base.replace("switch_mlp", "experts")
        found[f"{experts}gate_up_proj"] = mx.concatenate(fused, axis=1)
        found[f"{experts}down_proj"] = found.pop(f"{base}down_proj.weight")
    mx.eval(found)
    return found
