"""A Qwen3-Next checkpoint, made of the weights of a Qwen3.5 mixture of experts of the same sizes.

Both compute the same. Only names, the order of rows and the place of the config's fields differ.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

Weights = dict[str, mx.array]

_GDN = ".linear_attn."


def next_config(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the config.json of a Qwen3-Next model as published: flat, and without any field of the head."""
    text = dict(config["text_config"])
    rope = text.pop("rope_parameters")
    for name in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "layer_types"):
        del text[name]
    return {
        **text,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "intermediate_size": 2 * text["hidden_size"],
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None,
        "partial_rotary_factor": rope["partial_rotary_factor"],
        **fields,
    }


def next_weights(text: dict[str, Any], weights: Weights) -> Weights:
    """Return raw weights under the names of Qwen3-Next, with combined projections.

    Layers in `mlp_only_layers` get a dense MLP of random weights instead of their experts.
    """
    heads = text["linear_num_key_heads"]
    found: Weights = {}
    for stored, weight in weights.items():
        name = stored.replace("model.language_model.", "model.")
        if "visual" in name:
            continue
        if name.endswith(f"{_GDN}in_proj_qkv.weight"):
            keys = heads * text["linear_key_head_dim"]
            parts = mx.split(weight, [keys, 2 * keys])
            z = weights[stored.replace("qkv", "z")]
            found[name.replace("qkv", "qkvz")] = _by_head(heads, [*parts, z])
        elif name.endswith(f"{_GDN}in_proj_b.weight"):
            a = weights[stored.replace("in_proj_b", "in_proj_a")]
            found[name.replace("in_proj_b", "in_proj_ba")] = _by_head(heads, [weight, a])
        elif not name.endswith((f"{_GDN}in_proj_z.weight", f"{_GDN}in_proj_a.weight")):
            found[name] = weight
    for layer in text.get("mlp_only_layers", ()):
        prefix = f"model.layers.{layer}.mlp."
        found = {name: weight for name, weight in found.items() if not name.startswith(prefix)}
        found |= _dense_mlp(prefix, text["hidden_size"])
    return found


def _dense_mlp(prefix: str, hidden: int) -> Weights:
    size = 2 * hidden
    shapes = {"gate_proj": (size, hidden), "up_proj": (size, hidden), "down_proj": (hidden, size)}
    return {f"{prefix}{name}.weight": mx.random.normal(shape, scale=shape[1] ** -0.5) for name, shape in shapes.items()}


def _by_head(heads: int, parts: list[mx.array]) -> mx.array:
    """Return the rows of `parts` as one matrix, in which each head has its rows of all parts."""
    hidden = parts[0].shape[1]
    split = [part.reshape(heads, -1, hidden) for part in parts]
    return mx.concatenate(split, axis=1).reshape(-1, hidden)
