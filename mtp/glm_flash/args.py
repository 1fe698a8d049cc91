"""The sizes of GLM-5.3-Flash, by the fields of transformers' `Glm5NextTextConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp.layers.sparse_attention import IndexerArgs

RULES: dict[str, tuple[str, float, float]] = {
    "linear_attn_config": ("nullable object", 0, 0),
    **dict.fromkeys(("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"), ("size", 1, 2**16)),
    "linear_lower_bound": ("nullable number", -1e30, 0),
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "index_topk"), ("size", 1, 2**20)
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_routed_experts", "num_experts_per_tok", "qk_nope_head_dim", "v_head_dim"),
        ("size", 1, 2**16),
    ),
    **dict.fromkeys(("index_n_heads", "index_head_dim", "index_kpool"), ("size", 1, 2**16)),
    **dict.fromkeys(("hc_mult", "hc_sinkhorn_iters"), ("size", 1, 1024)),
    "routed_scaling_factor": ("optional number", 0, 1e30),
    "swiglu_limit": ("number", 0, 1e30),
    "hc_eps": ("optional number", 0, 1),
    "first_k_dense_replace": ("optional integer", 0, 1024),
    **dict.fromkeys(("mlp_layer_types", "indexer_types"), ("nullable texts", 0, 0)),
}
"""The rules of the fields that only this family has: kind, lowest and highest value."""

_MUST_BE: dict[str, Any] = {
    "qk_rope_head_dim": 0,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mhc": True,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
}
"""The fields with one supported value, which is that of an absent one."""


@dataclass(frozen=True)
class DeltaArgs:
    """The sizes of Kimi Delta Attention, and the `bound` of the logarithm of a decay, None for no bound."""

    heads: int
    head_dim: int
    kernel: int
    bound: float | None


@dataclass(frozen=True)
class LatentArgs:
    """The sizes of multi-head latent attention: ranks of the queries and of the latents, and dimensions of a head."""

    heads: int
    q_rank: int
    rank: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class ExpertArgs:
    """The `count` experts of `inner` columns, of which a row takes `chosen`, and the factor of their sum."""

    count: int
    chosen: int
    inner: int
    factor: float


@dataclass(frozen=True)
class GlmArgs:
    """The sizes of the model. `limit` bounds the gated units of every MLP; `dense` layers have one of `inner`."""

    hidden: int
    inner: int
    dense: frozenset[int]
    limit: float
    eps: float
    streams: int
    mix_eps: float
    rounds: int
    delta: DeltaArgs
    latent: LatentArgs
    indexer: IndexerArgs
    experts: ExpertArgs

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> GlmArgs:
        """Return the sizes in a `text_config` that `find_problem` accepts, or of the share of a member of a group."""

        def sizes(*names: str) -> list[Any]:
            return [text[name] for name in names]

        delta = sizes("linear_num_key_heads", "linear_key_head_dim", "linear_conv_kernel_dim", "linear_lower_bound")
        latent = sizes("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        count, chosen, inner = sizes("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
        return cls(
            hidden=text["hidden_size"],
            inner=text["intermediate_size"],
            dense=_dense_layers(text),
            limit=text["swiglu_limit"],
            eps=text["rms_norm_eps"],
            streams=text["hc_mult"],
            mix_eps=text.get("hc_eps", 1e-6),
            rounds=text["hc_sinkhorn_iters"],
            delta=DeltaArgs(*delta),
            latent=LatentArgs(*latent),
            indexer=IndexerArgs(*sizes("index_n_heads", "index_head_dim", "index_topk", "index_kpool")),
            experts=ExpertArgs(count, chosen, inner, text.get("routed_scaling_factor", 1.0)),
        )


def _dense_layers(text: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers without experts: those of `mlp_layer_types`, or the first ones."""
    if kinds := text.get("mlp_layer_types"):
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
    return frozenset(range(text.get("first_k_dense_replace", 0)))


def find_problem(text: Mapping[str, Any]) -> str | None:
    """Return the fault of fields that keep their RULES, None if all are valid."""
    for name, wanted in _MUST_BE.items():
        if text.get(name, wanted) != wanted:
            return f"{name} is {text[name]!r:.60}, and only {wanted!r} is supported."
    if text["linear_lower_bound"] == 0:
        return "linear_lower_bound (gate_lower_bound) is 0. It must be negative, or no state would decay."
    if text["index_topk"] % text["index_kpool"]:
        return f"index_topk {text['index_topk']} is not a multiple of index_kpool {text['index_kpool']}."
    shared = [layer for layer, kind in enumerate(text.get("indexer_types") or []) if kind != "full"]
    if shared or text.get("index_topk_pattern") or text.get("index_topk_freq", 1) != 1:
        return "indexer_types has layers without an indexer of their own, and only 'full' is supported, as published."
    return None
