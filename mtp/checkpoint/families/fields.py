"""The checker of a table of fields: the kind of each field of config.json, and its lowest and highest value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Text = dict[str, Any]
"""The fields of a language model in config.json. mlx-lm modifies its input: pass a copy."""

Rule = tuple[str, float, float]
"""A rule for a field: its kind, and the lowest and highest value. A number exceeds the lowest one.

An `optional` field may be absent, and a `nullable` one may be null too.
"""

LAYERS, HEADS, COLUMNS = 1024, 2**16, 2**20
"""The most layers, heads and columns that a config may have, far above those of every published model."""

COMMON_RULES: dict[str, Rule] = {
    "num_hidden_layers": ("size", 1, LAYERS),
    "hidden_size": ("size", 1, COLUMNS),
    "vocab_size": ("size", 1, 2**26),
    "max_position_embeddings": ("size", 1, 2**40),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), ("size", 1, HEADS)),
    "head_dim": ("optional size", 1, HEADS),
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), ("optional integer", 0, HEADS)),
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
        ("optional integer", 0, COLUMNS),
    ),
    "rms_norm_eps": ("optional number", 0, 1),
    "attention_bias": ("optional boolean", 0, 0),
    "layer_types": ("nullable texts", 0, 0),
    **dict.fromkeys(("mtp_num_hidden_layers", "num_nextn_predict_layers"), ("nullable integer", 0, LAYERS)),
    "mtp_use_dedicated_embeddings": ("nullable boolean", 0, 0),
    "eos_token_id": ("nullable tokens", 0, 2**31),
}
"""The rules of the fields that every family reads."""

_KINDS: dict[str, tuple[str, Callable[[Any, float, float], bool]]] = {
    "integer": (
        "an integer from {:.0f} to {:.0f}",
        lambda value, low, high: type(value) is int and low <= value <= high,
    ),
    "size": ("a positive integer up to {1:.0f}", lambda value, low, high: type(value) is int and 0 < value <= high),
    "number": (
        "a number above {:g} and up to {:g}",
        lambda value, low, high: type(value) in (int, float) and low < value <= high,
    ),
    "integers": ("a list of integers from {:.0f} to {:.0f}", lambda *given: _are_all("integer", *given)),
    "tokens": (
        "a token id or a list of them",
        lambda value, *range: _are_all("integer", value if isinstance(value, list) else [value], *range),
    ),
    "texts": ("a list of texts", lambda *given: _are_all("text", *given)),
    "text": ("a text", lambda value, *_: isinstance(value, str)),
    "boolean": ("true or false", lambda value, *_: isinstance(value, bool)),
    "object": ("an object", lambda value, *_: isinstance(value, dict)),
}
"""The description of each kind for errors, and its check of a value, with the lowest and highest one."""


def _are_all(kind: str, values: Any, low: float, high: float) -> bool:
    return isinstance(values, list) and all(_KINDS[kind][1](each, low, high) for each in values)


def find_wrong_field(rules: Mapping[str, Rule], fields: Text) -> str | None:
    """Return the fault of the first field that breaks its rule, None if all are valid."""
    for name, (kind, low, high) in rules.items():
        *option, kind = kind.split()
        value = fields.get(name)
        if (option and name not in fields) or (option == ["nullable"] and value is None):
            continue
        wanted, is_valid = _KINDS[kind]
        if not is_valid(value, low, high):
            found = "is missing" if value is None else f"is {value!r:.60}"
            return f"{name} {found}. It must be {wanted.format(low, high)}."
    return None
