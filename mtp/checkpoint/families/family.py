"""A model family as this project sees it: a base class with one method per difference."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mtp.checkpoint.families.fields import COMMON_RULES, Rule, Text
from mtp.checkpoint.families.parameters import PLAIN, PROJECTIONS, Parameter
from mtp.checkpoint.families.shape import Shape
from mtp.head.drafter import MTPHead
from mtp.layers.layer import Layer
from mtp.layers.reference import reference_layer
from proto.span import Span

CallForm = Literal["xml", "json", "pairs", "invokes"]
"""The forms of tool calls that the coordinator forces: elements of Qwen3.5, objects of Hermes, pairs of GLM, and
elements of MiniMax. It parses the first three itself."""

OpenCheckpoint = Any
"""A `mtp.checkpoint.format.checkpoint.Checkpoint`, whose module imports the families."""


class Sizes(NamedTuple):
    """The sizes of a whole model. `positions` is the most tokens of a sequence, `experts` 0 without any.

    Heads are 1 where a family does not cut its layers by them.
    """

    hidden: int
    layers: int
    vocabulary: int
    positions: int
    experts: int = 0
    is_tied: bool | None = None
    kv_heads: int = 1
    head_dim: int = 1


class StageParts(NamedTuple):
    """The loaded parts of a stage as the engine calls them. A part that the stage does not own is None."""

    layers: Sequence[Layer]
    embed: Any = None
    norm: Any = None
    lm_head: Any = None
    head: MTPHead | None = None


class Place(NamedTuple):
    """The place of a stored tensor: its part, its name within it, and what it is there.

    A tensor `on disk` is read by the family alone, while tokens are computed. One that is `ignored` changes nothing.
    """

    part: str
    name: str
    use: Literal["parameter", "on disk", "ignored"] = "parameter"


_HEAD_ALIASES = (
    (re.compile(r"eh_proj\b"), "fc"),
    (re.compile(r"enorm\b"), "pre_fc_norm_embedding"),
    (re.compile(r"hnorm\b"), "pre_fc_norm_hidden"),
    (re.compile(r"shared_head[._]norm\b"), "norm"),
)
"""From the names of DeepSeek's head, which engines use for all heads, to those of Qwen's."""


def head_name(within: str, modules: frozenset[str]) -> str:
    """Return a name within a head by Qwen's names. All but `modules` belong to its decoder layer."""
    for alias, name in _HEAD_ALIASES:
        within = alias.sub(name, within, count=1) if alias.match(within) else within
    return within if within.partition(".")[0] in modules else f"layers.0.{within}"


_LAYER = re.compile(r"layers\.([0-9]{1,9})\.(.+)")


@lru_cache(maxsize=2**16)
def _first_match(rows: tuple[Parameter, ...], name: str) -> Parameter:
    return next((row for row in rows if re.fullmatch(row.pattern, name)), PLAIN)


class Family(ABC):
    """The description of a family: its names in config.json, its sizes, its parameters and its modules."""

    releases: ClassVar[str]
    """The published models, for error messages."""

    model_types: ClassVar[dict[str, str]]
    """From `model_type` in config.json to the type that this project reports."""

    head_types: ClassVar[dict[str, str]] = {}
    """The same for repos that hold nothing but an MTP head."""

    prefix: ClassVar[str]
    """The prefix of all names in a checkpoint that mlx-lm converted."""

    is_own: ClassVar[bool] = False
    """True if mlx-lm has no such model, and `--exact` none of its layers."""

    as_published: ClassVar[bool] = False
    """True if a class of mlx-lm reads the whole config.json, and `place` the names of tensors with their prefixes."""

    sees_images: ClassVar[bool] = True
    """True if the vision part of a checkpoint can be used."""

    rules: ClassVar[Mapping[str, Rule]] = COMMON_RULES
    """The rules of the fields that the family reads, which are checked before anything else."""

    parameters: ClassVar[tuple[Parameter, ...]] = PROJECTIONS
    """The table of parameters. Rows of a family alone come first."""

    ends: ClassVar[Mapping[str, str]] = {"embed_tokens": "embed", "norm": "norm", "lm_head": "lm_head"}
    """From the modules beside the layers to their parts. A part that is listed twice is written by its last name."""

    call_forms: ClassVar[Mapping[str, CallForm]] = {
        "qwen3_coder": "xml",
        "json_tools": "json",
        "glm47": "pairs",
        "minimax_m2": "invokes",
    }
    """The form of calls by mlx-lm's parser of tools, which follows from a checkpoint's chat template."""

    head_modules: ClassVar[frozenset[str]] = frozenset(
        ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers", "lm_head")
    )
    """The modules of an MTP head. All others belong to its decoder layer."""

    def serves(self, model_type: str) -> bool:
        """Return whether this is the family of `model_type`, one of a whole model."""
        return model_type in self.model_types

    # ---- fields

    def text_part(self, config: Text) -> Any:
        """Return the fields of the language model in a config.json."""
        return config.get("text_config", config)

    def sizes(self, text: Text) -> Sizes:
        """Return the sizes of the model. `text` has no problem."""
        hidden = text["hidden_size"]
        return Sizes(
            hidden=hidden,
            layers=text["num_hidden_layers"],
            vocabulary=text["vocab_size"],
            positions=text["max_position_embeddings"],
            experts=text.get("num_experts") or 0,
            is_tied=text.get("tie_word_embeddings"),
            kv_heads=text["num_key_value_heads"],
            head_dim=text["head_dim"] if "head_dim" in text else hidden // text["num_attention_heads"],
        )

    def named_fields(self, text: Text) -> Text:
        """Return `text` with its sizes by the names that Qwen3.5 has for them. Any field may be missing or wrong."""
        return text

    def find_problem(self, text: Text) -> str | None:
        """Return the fault of fields that keep their rules, None if all are valid."""
        return None

    def announced_head_layers(self, text: Text) -> Any:
        """Return the number of layers of the MTP head that config.json announces."""
        return text.get("mtp_num_hidden_layers", text.get("num_nextn_predict_layers"))

    @abstractmethod
    def shape(self, text: Text) -> Shape:
        """Return the sizes of layers and states. `text` has no problem, and may be that of a member's share."""

    def segments(self, text: Text) -> tuple[int, ...]:
        """Return the rows of each segment of a parameter that is cut by segments."""
        return ()

    @abstractmethod
    def convert_text(self, text: Text) -> None:
        """Edit the fields of a converted config.json, so that mlx-lm computes the same as the engine."""

    # ---- names

    def place(self, local: str, text: Text) -> Place | None:
        """Return the place of a tensor by its local name, or None when no part of this model has it."""
        head, _, rest = local.partition(".")
        if not rest:
            return None
        if head in self.ends:
            return Place(self.ends[head], rest)
        if head == "mtp":
            return Place("mtp", rest)
        layer = _LAYER.fullmatch(local)
        if layer is None or int(layer[1]) >= text["num_hidden_layers"]:
            return None
        return Place(f"layers.{int(layer[1])}", layer[2])

    def path(self, part: str, within: str) -> str:
        """Return the local name of a module or parameter of a part; the inverse of `place`."""
        modules = {part: module for module, part in self.ends.items()}
        return f"{modules.get(part, part)}.{within}".removesuffix(".")

    def module_path(self, text: Text, part: str, within: str) -> str:
        """Return the name of a module or parameter of a part in `backbone`, whose head is the module `mtp`."""
        return ("" if part in ("lm_head", "mtp") else "model.") + self.path(part, within)

    def rule(self, part: str, name: str) -> Parameter:
        """Return the rules of a parameter by its name within `part`."""
        return _first_match(self.parameters, f"{part}.{name}")

    def plan_tensors(self, text: Text, stored: Mapping[str, tuple[str, tuple[int, ...]]]) -> Any:
        """Return the plan of a checkpoint from the types and shapes of its tensors, None to make one from `place`."""
        return None

    @property
    def has_raw_layout(self) -> bool:
        """True if publishers store parameters in another way than converted checkpoints."""
        return any(row.raw is not row.mlx for row in self.parameters)

    # ---- modules

    @abstractmethod
    def backbone(self, text: Text) -> nn.Module:
        """Return mlx-lm's model without weights. Its names begin with `model.` and `lm_head.`."""

    @abstractmethod
    def layer(self, text: Text, index: int) -> nn.Module:
        """Return layer `index` with the parameter names of a converted checkpoint."""

    def engine_layer(self, text: Text, layer: nn.Module) -> nn.Module:
        """Return a loaded `layer` with the modules that the engine runs. Its weights may be lazy."""
        return layer

    def norm(self, text: Text) -> nn.Module:
        """Return the final norm, whose output `[rows, hidden_size]` lm_head reads, without weights."""
        return nn.RMSNorm(text["hidden_size"], eps=text.get("rms_norm_eps", 1e-6))

    def head(self, text: Text) -> MTPHead | None:
        """Return the MTP head without weights, None for a family without. A complete head has all its parameters."""
        return None

    def part(self, text: Text, part: str) -> nn.Module | None:
        """Return a part beside the layers without weights, None for the usual module."""
        return None

    def stage_parts(self, text: Text, span: Span, parts: Mapping[str, Any]) -> StageParts:
        """Return the loaded `parts` of the stage of `span`, by name, with reference layers."""
        layers = [self.stage_layer(parts[f"layers.{layer}"]) for layer in span]
        return StageParts(layers, *map(parts.get, ("embed", "norm", "lm_head", "mtp")))

    def stage_layer(self, layer: Any) -> Layer:
        """Return what `engine_layer` returned behind the interface of layers."""
        return reference_layer(layer)

    # ---- tensors that stay on disk

    def open_on_disk(self, checkpoint: OpenCheckpoint, part: str, layer: nn.Module) -> None:
        """Give `layer` the tensors of its part that stay on disk. Raises CheckpointError."""
        return

    def convert_on_disk(
        self, checkpoint: OpenCheckpoint, cast: Callable[[mx.array], mx.array], bits: int | None
    ) -> dict[str, mx.array]:
        """Return the tensors that stay on disk by their names in an MLX checkpoint. Raises CheckpointError."""
        return {}

    def sizes_on_disk(self, text: Text, bits: int | None) -> dict[str, tuple[str, tuple[int, int]]]:
        """Return the type and the shape of each tensor that `convert_on_disk` would return."""
        return {}
