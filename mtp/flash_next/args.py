"""The sizes of a Flash-Next model beyond those that Qwen3.5 has, from `text_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp.layers.sparse_attention import IndexerArgs

_DEFAULTS: dict[str, Any] = {
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "seed": 1234,
    "rms_norm_eps": 1e-6,
}
"""The values of absent fields, as transformers' `Qwen4ExpTextConfig` has them."""

RULES: dict[str, tuple[str, float, float]] = {
    "hc_count": ("optional integer", 2, 64),
    "hc_lowrank": ("optional size", 1, 2**16),
    **dict.fromkeys(("ple_conv_kernel_size", "heads_per_ngram"), ("optional size", 1, 1024)),
    "ngram_size": ("optional integer", 2, 16),
    **dict.fromkeys(("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by"), ("optional size", 1, 2**32)),
    "seed": ("optional size", 1, 2**63),
    **dict.fromkeys(
        ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio"), ("size", 1, 2**20)
    ),
    "indexer_kv_heads": ("optional integer", 1, 1),
    "ple_layer_ids": ("nullable integers", 1, 1024),
    "ple_embed_dim": ("nullable integer", 0, 2**20),
    "output_gate_type": ("nullable text", 0, 0),
    "hidden_act": ("optional text", 0, 0),
}
"""The rules of the fields that only this family has: kind, lowest and highest value."""

_INDEXER = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")


@dataclass(frozen=True)
class NgramArgs:
    """The sizes of the per-layer embedding (PLE): hashed n-grams of 2 to `size` tokens, with `heads` rows for each n.

    `layers` are the layers that have one, from 0.
    """

    layers: tuple[int, ...]
    dim: int
    kernel: int
    size: int
    heads: int
    base: int
    divisor: int
    seed: int
    vocab: int
    eos: int

    @property
    def all_heads(self) -> int:
        """Rows of a token."""
        return (self.size - 1) * self.heads

    @property
    def row_dim(self) -> int:
        """Values of a row."""
        return self.dim // self.all_heads


@dataclass(frozen=True)
class FlashNextArgs:
    """The residual `streams` of the hyper-connections, the `rank` of their mixers, and the two mechanisms above."""

    hidden: int
    streams: int
    rank: int
    eps: float
    gate: str
    indexer: IndexerArgs
    ngrams: NgramArgs | None

    @property
    def width(self) -> int:
        """Values of a row between two layers."""
        return self.streams * self.hidden

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> FlashNextArgs:
        """Return the sizes in a `text_config` that `find_problem` accepts."""
        fields = {**_DEFAULTS, **text}
        indexer = IndexerArgs(*(fields[name] for name in _INDEXER))
        ngrams = None
        if fields.get("ple_layer_ids"):
            eos = fields["eos_token_id"]
            ngrams = NgramArgs(
                layers=tuple(sorted({layer - 1 for layer in fields["ple_layer_ids"]})),
                dim=fields.get("ple_embed_dim") or fields["hidden_size"],
                kernel=fields["ple_conv_kernel_size"],
                size=fields["ngram_size"],
                heads=fields["heads_per_ngram"],
                base=fields["ngram_vocab_size_base"],
                divisor=fields["make_ngram_vocab_size_divisible_by"],
                seed=fields["seed"],
                vocab=fields["vocab_size"],
                eos=eos[0] if isinstance(eos, list) else eos,
            )
        return cls(
            fields["hidden_size"],
            fields["hc_count"],
            fields["hc_lowrank"],
            fields["rms_norm_eps"],
            fields.get("output_gate_type") or fields.get("hidden_act", "silu"),
            indexer,
            ngrams,
        )


def find_problem(text: Mapping[str, Any]) -> str | None:
    """Return the fault of fields that keep their RULES, None if all are valid."""
    fields = {**_DEFAULTS, **text}
    rope = text.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return f"rope_parameters.rope_type is {rope.get('rope_type')!r:.60}, and only 'default' is supported."
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    checks = {
        "indexer_compress_ratio": fields["indexer_budget"] % fields["indexer_compress_ratio"] == 0,
        "indexer_head_dim": rotated <= fields["indexer_head_dim"],
        "hidden_act": fields.get("hidden_act", "silu") == "silu",
        "output_gate_type": (fields.get("output_gate_type") or "silu") in ("silu", "sigmoid"),
    }
    for name, is_valid in checks.items():
        if not is_valid:
            return f"{name} {fields.get(name)!r:.60} is not supported."
    return _ngram_problem(fields)


def _ngram_problem(fields: Mapping[str, Any]) -> str | None:
    layers = fields.get("ple_layer_ids") or []
    interval, count = fields.get("full_attention_interval") or 4, fields["num_hidden_layers"]
    if wrong := [n for n in layers if not 0 < n <= count or n % interval == 0]:
        return f"ple_layer_ids has {wrong[0]}, which is no GatedDeltaNet layer of this model."
    if not layers:
        return None
    dim = fields.get("ple_embed_dim") or fields["hidden_size"]
    if dim % ((fields["ngram_size"] - 1) * fields["heads_per_ngram"]):
        return f"ple_embed_dim {dim!r:.60} is not a multiple of the n-gram heads."
    if fields.get("eos_token_id") in (None, []):
        return "eos_token_id is missing, and n-grams begin with it."
    return None
