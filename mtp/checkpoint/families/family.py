"""A model family as this project sees it: a base class with one method per difference, and the family of Qwen3.5."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Literal

import mlx.nn as nn
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModel, TextModelArgs

from mtp.head.drafter import MTPHead
from mtp.layers.layer import Layer
from mtp.layers.reference import reference_layer

CallForm = Literal["xml", "json", "pairs"]
"""The forms of tool calls that the coordinator parses and forces: Qwen3.5's elements, Hermes' objects, GLM's pairs."""

Text = dict[str, Any]
"""The fields of a language model in config.json, with `rope_parameters`. mlx-lm modifies its input: pass a copy."""


_EXPERTS = re.compile(r"\.mlp\.(switch_mlp|experts)\.")

_FIELDS = frozenset(field.name for field in fields(TextModelArgs))


def model_args(text: Text) -> TextModelArgs:
    """Return mlx-lm's arguments from `text`. Its own `from_dict` takes seconds of a load."""
    return TextModelArgs(**{name: value for name, value in text.items() if name in _FIELDS})


Rule = tuple[str, float, float]
"""A rule for a field: its kind, and the lowest and highest value. A number exceeds the lowest one.

An `optional` field may be absent, and a `nullable` one may be null too.
"""

LAYERS, HEADS, COLUMNS = 1024, 2**16, 2**20
"""The most layers, heads and columns that a config may have, far above those of every published model."""

ROPE_RULES: dict[str, Rule] = {
    "rope_theta": ("number", 0, 1e30),
    "partial_rotary_factor": ("optional number", 0, 1),
    **dict.fromkeys(("rope_type", "type"), ("optional text", 0, 0)),
}
"""The rules of the fields of `rope_parameters`."""

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


class Family(ABC):
    """The names of a family in config.json, and the modules of its layers. The engine runs those of Qwen3.5."""

    releases: ClassVar[str]
    """The published models, for error messages."""

    model_types: ClassVar[dict[str, str]]
    """From `model_type` in config.json to the type that this project reports."""

    head_types: ClassVar[dict[str, str]]
    """The same for repos that hold nothing but an MTP head."""

    prefix: ClassVar[str]
    """The prefix of all names in a checkpoint that mlx-lm converted."""

    attention_types: ClassVar[tuple[str, ...]] = ("full_attention",)
    """The names of attention layers in `layer_types`."""

    cuts_layers: ClassVar[bool] = True
    """True if the members of a group can hold shares of a layer."""

    is_own: ClassVar[bool] = False
    """True if mlx-lm has no such model, and `--exact` none of its layers."""

    sees_images: ClassVar[bool] = True
    """True if the vision part of a checkpoint can be used."""

    head_is_layer: ClassVar[bool] = False
    """True if the publisher stores the MTP head as one more layer after the last one."""

    launches: ClassVar[float] = 1.0
    """Launches of a layer, as a multiple of those of a layer of Qwen3.5."""

    quantizes_kv: ClassVar[bool] = True
    """True if keys and values can be stored in 4 or 8 bits."""

    rules: ClassVar[Mapping[str, Rule]] = {
        "num_hidden_layers": ("size", 1, LAYERS),
        "hidden_size": ("size", 1, COLUMNS),
        "vocab_size": ("size", 1, 2**26),
        "max_position_embeddings": ("size", 1, 2**40),
        **dict.fromkeys(
            ("num_attention_heads", "num_key_value_heads", "linear_num_value_heads", "linear_num_key_heads"),
            ("size", 1, HEADS),
        ),
        **dict.fromkeys(("linear_value_head_dim", "linear_key_head_dim", "linear_conv_kernel_dim"), ("size", 1, HEADS)),
        "head_dim": ("optional size", 1, HEADS),
        **dict.fromkeys(("num_experts", "num_experts_per_tok"), ("optional integer", 0, HEADS)),
        **dict.fromkeys(
            ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
            ("optional integer", 0, COLUMNS),
        ),
        **dict.fromkeys(("full_attention_interval", "decoder_sparse_step"), ("optional size", 1, LAYERS)),
        "rms_norm_eps": ("optional number", 0, 1),
        "attention_bias": ("optional boolean", 0, 0),
        "layer_types": ("nullable texts", 0, 0),
        **dict.fromkeys(("mtp_num_hidden_layers", "num_nextn_predict_layers"), ("nullable integer", 0, LAYERS)),
        "mtp_use_dedicated_embeddings": ("nullable boolean", 0, 0),
        "eos_token_id": ("nullable tokens", 0, 2**31),
    }
    """The rules of the fields that the family reads, which are checked before anything else."""

    call_forms: ClassVar[Mapping[str, CallForm]] = {"qwen3_coder": "xml", "json_tools": "json", "glm47": "pairs"}
    """The form of calls by mlx-lm's parser of tools, which follows from a checkpoint's chat template."""

    head_modules: ClassVar[tuple[str, ...]] = (
        "fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers",
    )  # fmt: skip
    """The modules of an MTP head. All others belong to its decoder layer."""

    offset_norms: ClassVar[tuple[str, ...]] = (
        "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
    )  # fmt: skip
    """The RMSNorms whose raw weight is an offset from 1, beside the final norms. `linear_attn.norm` is none."""

    def named_fields(self, text: Text) -> Text:
        """Return `text` with its sizes by the names that Qwen3.5 has for them. Any field may be missing or wrong."""
        return text

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

    def norm(self, text: Text) -> nn.Module:
        """Return the final norm, whose output `[rows, hidden_size]` lm_head reads, without weights."""
        args = self.text_args(text)
        return nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def head(self, text: Text) -> MTPHead:
        """Return the MTP head without weights. A complete head has all its parameters."""
        return MTPHead(self.text_args(text))

    def stage_layer(self, layer: Any) -> Layer:
        """Return what `engine_layer` returned behind the interface of layers."""
        return reference_layer(layer)

    def streams(self, text: Text) -> int:
        """Return the residual streams of a row between two layers, each of `hidden_size` values."""
        return 1

    def token_layers(self, text: Text) -> tuple[int, ...]:
        """Return the layers that read the tokens of their rows. They have to be on the first stage."""
        return ()

    def table_part(self, local: str) -> tuple[str, str, int] | None:
        """Return the part, the kind and the number of a tensor of rows that stay on disk, or None for other tensors."""
        return None

    def derived_values(self, text: Text, local: str) -> list[int] | None:
        """Return the values of a stored tensor of integers that follow from config.json, or None for other tensors."""
        return None

    def read_share(self, text: Text, stored: str) -> float:
        """Return the share of the stored tensor that one token reads."""
        if text.get("num_experts") and _EXPERTS.search(stored):
            return min(1.0, float(text["num_experts_per_tok"]) / float(text["num_experts"]))
        return 1.0

    def kv_values(self, text: Text, kv_heads: int, head_dim: int) -> int:
        """Return the values of a token that an attention layer stores, with these heads of keys and values."""
        return 2 * kv_heads * head_dim

    def token_values(self, text: Text) -> int:
        """Return the values of a sequence that each layer of `token_layers` stores besides those of its kind."""
        return 0

    def mlp_fields(self, text: Text) -> tuple[str, ...]:
        """Return the fields of the MLPs that config.json must have, each a positive integer."""
        if not text.get("num_experts"):
            return ("intermediate_size",)
        return ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")

    def find_problem(self, text: Text) -> str | None:
        """Return the fault of a field that only this family has, None if all are valid. Each field keeps its rule."""
        return None

    def announced_head_layers(self, text: Text) -> Any:
        """Return the number of layers of the MTP head that config.json announces."""
        return text.get("mtp_num_hidden_layers", text.get("num_nextn_predict_layers"))

    @abstractmethod
    def convert_text(self, text: Text) -> None:
        """Edit the fields of a converted config.json, so that mlx-lm computes the same as the engine."""


class Qwen35(Family):
    """Qwen3.5, 3.6 and 3.8, whose modules the engine runs: dense or with experts, with or without a vision part."""

    releases = "Qwen3.5, Qwen3.6 or Qwen3.8"
    model_types: ClassVar = {
        "qwen3_5": "qwen3_5",
        "qwen3_5_text": "qwen3_5",
        "qwen3_5_moe": "qwen3_5_moe",
        "qwen3_5_moe_text": "qwen3_5_moe",
    }
    head_types: ClassVar = {"qwen3_5_mtp": "qwen3_5", "qwen3_5_moe_mtp": "qwen3_5_moe"}
    prefix = "language_model."

    def text_args(self, text: Text) -> TextModelArgs:
        """Return mlx-lm's arguments. The weights of the chosen experts have the sum 1, as in transformers."""
        return model_args({**text, "norm_topk_prob": True})

    def backbone(self, text: Text) -> nn.Module:
        return TextModel(self.text_args(text))

    def layer(self, text: Text, index: int) -> nn.Module:
        return DecoderLayer(self.text_args(text), index)

    def convert_text(self, text: Text) -> None:
        """Remove `norm_topk_prob`: mlx-lm would follow it, and transformers does not."""
        text.pop("norm_topk_prob", None)
