"""Qwen3.5, and what it shares with other families of linear attention and full attention in every n-th layer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

import mlx.nn as nn
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModel, TextModelArgs
from mlx_lm.models.rope_utils import initialize_rope

from mtp.checkpoint.families.family import Family
from mtp.checkpoint.families.fields import COLUMNS, COMMON_RULES, HEADS, LAYERS, Text, find_wrong_field
from mtp.checkpoint.families.parameters import GATED_DELTA, OFFSET_NORMS, PROJECTIONS, Parameter
from mtp.checkpoint.families.shape import LayerShape, Shape
from mtp.head.drafter import MTPHead

PARTIAL_ROTARY_FACTOR = 0.25
"""Share of the rotated dimensions in Qwen3.5, where the config does not have it."""

_ROPE_RULES = {
    "rope_theta": ("number", 0, 1e30),
    "partial_rotary_factor": ("optional number", 0, 1),
    **dict.fromkeys(("rope_type", "type"), ("optional text", 0, 0)),
}
"""The rules of the fields of `rope_parameters`."""

_ARGS = frozenset(field.name for field in fields(TextModelArgs))

_HEADS = ("linear_num_key_heads", "linear_num_value_heads")


def model_args(text: Text) -> TextModelArgs:
    """Return mlx-lm's arguments from `text`. Its own `from_dict` takes seconds of a load."""
    return TextModelArgs(**{name: value for name, value in text.items() if name in _ARGS})


class HybridFamily(Family):
    """Layers with a state of fixed size, and attention in every `full_attention_interval`-th one."""

    attention_types: ClassVar[tuple[str, ...]] = ("full_attention",)
    """The names of attention layers in `layer_types`."""

    rules: ClassVar = {
        **COMMON_RULES,
        **dict.fromkeys((*_HEADS, "linear_value_head_dim", "linear_key_head_dim"), ("size", 1, HEADS)),
        "linear_conv_kernel_dim": ("size", 1, HEADS),
        **dict.fromkeys(("full_attention_interval", "decoder_sparse_step"), ("optional size", 1, LAYERS)),
    }

    parameters: ClassVar[tuple[Parameter, ...]] = (*OFFSET_NORMS, *GATED_DELTA, *PROJECTIONS)

    def named_fields(self, text: Text) -> Text:
        return _with_interval(_with_rope_parameters(text))

    def text_args(self, text: Text) -> TextModelArgs:
        """Return the arguments of the engine's modules, and of the MTP head."""
        return model_args(text)

    def mlp_fields(self, text: Text) -> tuple[str, ...]:
        """Return the fields of the MLPs that config.json must have, each a positive integer."""
        if not text.get("num_experts"):
            return ("intermediate_size",)
        return ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")

    def find_own_problem(self, text: Text) -> str | None:
        """Return the fault of a field that only this family has, None if all are valid. Each field keeps its rule."""
        return None

    def find_problem(self, text: Text) -> str | None:
        sizes = dict.fromkeys(self.mlp_fields(text), ("size", 1.0, float(COLUMNS)))
        problem = _rope_problem(text) or self.find_own_problem(text) or find_wrong_field(sizes, text)
        if problem:
            return problem
        experts, (keys, values) = text.get("num_experts"), (text[name] for name in _HEADS)
        if experts and text["num_experts_per_tok"] > experts:
            return f"num_experts_per_tok {text['num_experts_per_tok']} is more than the {experts} experts."
        if values % keys:
            return f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}"
        return _rotation_problem(text) or self._kinds_problem(text)

    def _kinds_problem(self, text: Text) -> str | None:
        """Return the fault of `layer_types`. mlx-lm derives the kinds from the interval, so both must agree."""
        interval, layers, types = interval_of(text), text["num_hidden_layers"], text.get("layer_types")
        wanted = ["linear_attention" if layer % interval else "full_attention" for layer in range(1, layers + 1)]
        if types is None or wanted == ["full_attention" if n in self.attention_types else n for n in types]:
            return None
        return (
            f"layer_types is not linear attention with full attention every {interval}th of "
            f"{layers} layers, and mlx-lm supports no other pattern. Download config.json again: "
            "full_attention_interval may be missing, or num_hidden_layers edited."
        )

    def segments(self, text: Text) -> tuple[int, int, int]:
        """Return the rows of queries, keys and values of a GatedDeltaNet."""
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        return keys, keys, text["linear_num_value_heads"] * text["linear_value_head_dim"]

    def attention_shape(self, text: Text) -> LayerShape:
        """Return the state of an attention layer: keys and values."""
        return LayerShape("attention", token_values=2 * text["num_key_value_heads"] * head_dim_of(text))

    def linear_shape(self, text: Text, layer: int) -> LayerShape:
        """Return the state of linear attention: the rows that its convolution reads, and the recurrent state."""
        rows = (text["linear_conv_kernel_dim"] - 1) * sum(self.segments(text))
        state = self.segments(text)[-1] * text["linear_key_head_dim"]
        return LayerShape("gdn", sequence_values=rows, fixed_bytes=4 * state)

    def shape(self, text: Text) -> Shape:
        attention, interval, experts = self.attention_shape(text), interval_of(text), text.get("num_experts")
        return Shape(
            hidden=text["hidden_size"],
            layers=tuple(
                self.linear_shape(text, layer) if (layer + 1) % interval else attention
                for layer in range(text["num_hidden_layers"])
            ),
            head=attention,
            routed_share=min(1.0, text["num_experts_per_tok"] / experts) if experts else 1.0,
        )

    def head(self, text: Text) -> MTPHead:
        return MTPHead(self.text_args(text))


class Qwen35(HybridFamily):
    """Qwen3.5, 3.6 and 3.8: dense or with experts, with or without a vision part. The engine runs mlx-lm's modules."""

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


def head_dim_of(text: Text) -> int:
    """Return the dimensions of a head of attention."""
    return int(text["head_dim"] if "head_dim" in text else text["hidden_size"] // text["num_attention_heads"])


def interval_of(text: Text) -> int:
    """Return the number of layers of which the last has full attention."""
    return text.get("full_attention_interval") or 4


def _with_rope_parameters(text: Text) -> Text:
    """Return `text` with `rope_parameters`, as transformers builds them from the three fields of older exporters.

    `text` is returned unchanged when it has `rope_parameters`, or has no valid older fields.
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


def _with_interval(text: Text) -> Text:
    """Return `text` with `full_attention_interval`, which transformers writes only as the list `layer_types`."""
    types = text.get("layer_types")
    if text.get("full_attention_interval") is not None or not isinstance(types, list):
        return text
    found = (place for place, kind in enumerate(types, 1) if kind != "linear_attention")
    return {**text, "full_attention_interval": next(found, 4)}


def _rope_problem(text: Text) -> str | None:
    """Return the fault of RoPE's fields. Without a base mlx-lm would use a default, and the output would be wrong."""
    rope: Any = text.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return "rope_parameters has no rope_theta. Download config.json again."
    if problem := find_wrong_field(_ROPE_RULES, rope):
        return f"rope_parameters: {problem}"
    sections = rope.get("mrope_section", [0, 0, 0])
    if not isinstance(sections, list) or [type(n) for n in sections] != [int] * 3:
        return f"mrope_section is {sections!r:.60}. It must be three integers."
    return None


def _rotation_problem(text: Text) -> str | None:
    """Return the fault of a RoPE that mlx-lm cannot make. Its types have different fields."""
    rope = text["rope_parameters"]
    dims = int(head_dim_of(text) * rope.get("partial_rotary_factor", PARTIAL_ROTARY_FACTOR))
    try:
        initialize_rope(dims, rope["rope_theta"], False, dict(rope), text["max_position_embeddings"])
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
        return f"rope_parameters are not supported: {error!r:.100}."
    return None
