"""The model families: their names in configs, their modules, and their differences from Qwen3.5."""

from __future__ import annotations

from mtp.checkpoint.families.family import Family, Qwen35
from mtp.checkpoint.families.flash_next import FlashNext
from mtp.checkpoint.families.glm_flash import GlmFlash
from mtp.checkpoint.families.qwen3_next import Qwen3Next

FAMILIES: tuple[Family, ...] = (Qwen35(), Qwen3Next(), FlashNext(), GlmFlash())


def find_family(model_type: str) -> tuple[Family, str, bool] | None:
    """Return the family of a `model_type`, the reported type, and whether the repo holds only a head; or None."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family, family.model_types[model_type], False
        if model_type in family.head_types:
            return family, family.head_types[model_type], True
    return None
