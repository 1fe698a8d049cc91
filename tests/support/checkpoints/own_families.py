"""Small models of the families whose layers are this project's own, with transformers' backbones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.checkpoints import flash_next, glm_flash


@dataclass(frozen=True)
class SmallModel:
    """The name of a family in messages, the text config of a small model, and the functions that make it."""

    name: str
    text: dict[str, Any]
    reference: Callable[[dict[str, Any]], Any]
    write_reference: Callable[..., Path]

    def write(self, path: Path, **fields: Any) -> Path:
        """Write the model as it is published, with a head. Return `path`."""
        text = {**self.text, **fields}
        return self.write_reference(path, self.reference(text), text)


OWN_FAMILIES = {
    "flash-next": SmallModel(
        "Qwen3.8-Flash-Next",
        flash_next.text_config(ple_embed_dim=128),  # rows of n-grams that can be quantized
        flash_next.reference_model,
        flash_next.write_flash_next,
    ),
    "glm": SmallModel("GLM-5.3-Flash", glm_flash.TEXT, glm_flash.reference_model, glm_flash.write_glm_flash),
}
