"""The RoPE parameters of a config: at their present place, or at the places that older exporters used."""

from __future__ import annotations

from typing import Any

PARTIAL_ROTARY_FACTOR = 0.25
"""Share of the rotated dimensions in Qwen3.5, where the config does not have it."""


def with_rope_parameters(text: dict[str, Any]) -> dict[str, Any]:
    """Return `text` with `rope_parameters`, as transformers builds them from the older fields.

    Older exporters wrote `rope_theta`, `rope_scaling` and `partial_rotary_factor` as three fields. `text` is returned
    unchanged when it has `rope_parameters`, or has no valid older fields.
    """
    scaling = text.get("rope_scaling") or {}
    if "rope_parameters" in text or "rope_theta" not in text or not isinstance(scaling, dict):
        return text
    rope = {
        **scaling,
        "rope_type": scaling.get("rope_type", scaling.get("type", "default")),
        "rope_theta": text["rope_theta"],
        "partial_rotary_factor": text.get("partial_rotary_factor", PARTIAL_ROTARY_FACTOR),
    }
    return {**text, "rope_parameters": rope}
