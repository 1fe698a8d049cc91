"""The registered families. Nothing else names one."""

from __future__ import annotations

from mtp.checkpoint.families.family import Family
from mtp.checkpoint.families.qwen3_5 import Qwen35
from mtp.checkpoint.families.qwen3_next import Qwen3Next
from mtp.flash_next.family import FlashNext
from mtp.glm_flash.family import GlmFlash
from mtp.mlx_models.family import MlxLmFamily
from mtp.mlx_models.tested_types import known_results

FAMILIES: tuple[Family, ...] = (Qwen35(), Qwen3Next(), FlashNext(), GlmFlash(), MlxLmFamily())


def find_family(model_type: str) -> tuple[Family, str, bool] | None:
    """Return the family of a `model_type`, the reported type, and whether the repo holds only a head; or None."""
    for family in FAMILIES:
        if family.serves(model_type):
            return family, family.model_types.get(model_type, model_type), False
        if model_type in family.head_types:
            return family, family.head_types[model_type], True
    return None


def count_served_types() -> int:
    """Return the number of model types of mlx-lm that are served."""
    return sum(not tested.refused for tested in known_results().values())
