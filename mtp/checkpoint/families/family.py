"""A model family as this project sees it: a base class with one method per difference between families."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import mlx.nn as nn
from mlx_lm.models.qwen3_5 import TextModelArgs

Text = dict[str, Any]
"""The fields of a language model in config.json, with `rope_parameters`. mlx-lm modifies its input: pass a copy."""


class Family(ABC):
    """The names of a family in config.json, and the modules of its layers.

    The engine runs mlx-lm's modules of Qwen3.5. A family with other modules converts them in `engine_layer`.
    """

    releases: ClassVar[str]
    """The published models, for error messages."""

    model_types: ClassVar[dict[str, str]]
    """From `model_type` in config.json to the type that this project reports."""

    head_types: ClassVar[dict[str, str]]
    """The same for repos that hold nothing but an MTP head."""

    prefix: ClassVar[str]
    """The prefix of all names in a checkpoint that mlx-lm converted."""

    @abstractmethod
    def text_args(self, text: Text) -> TextModelArgs:
        """Return the arguments of the engine's modules, and of the MTP head."""

    @abstractmethod
    def backbone(self, text: Text) -> nn.Module:
        """Return mlx-lm's model without weights. Its names begin with `model.` and `lm_head.`."""

    @abstractmethod
    def layer(self, text: Text, index: int) -> nn.Module:
        """Return layer `index` with the parameter names of a converted checkpoint."""

    def engine_layer(self, text: Text, layer: nn.Module) -> nn.Module:
        """Return a loaded `layer` with the modules that the engine runs. Its weights may be lazy."""
        return layer

    def mlp_fields(self, text: Text) -> tuple[str, ...]:
        """Return the fields of the MLPs that config.json must have, each a positive integer."""
        if not text.get("num_experts"):
            return ("intermediate_size",)
        return ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")

    def find_problem(self, text: Text) -> str | None:
        """Return the fault of a field that only this family has, None when all are valid."""
        return None

    def announced_head_layers(self, text: Text) -> Any:
        """Return the number of layers of the MTP head that config.json announces."""
        return text.get("mtp_num_hidden_layers", text.get("num_nextn_predict_layers"))

    @abstractmethod
    def convert_text(self, text: Text) -> None:
        """Edit the fields of a converted config.json, so that mlx-lm computes the same as the engine."""
