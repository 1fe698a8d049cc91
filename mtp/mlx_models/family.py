"""The family of all models that mlx-lm has and no other family describes. Its class of the model stays as it is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mtp.checkpoint.families.family import Family, Place, Sizes, StageParts
from mtp.checkpoint.families.fields import Rule, Text
from mtp.checkpoint.families.parameters import Parameter
from mtp.checkpoint.families.shape import LayerShape, Shape
from mtp.mlx_models.head import NextNHead, Unembedding, announced_layers, head_of, head_shape, with_head
from mtp.mlx_models.layers import MlxLmSpan, Tail
from mtp.mlx_models.skeleton import Skeleton, make_model, module_name, module_of
from mtp.mlx_models.structure import ModelStructure, kind_for_people, structure_of
from mtp.mlx_models.tested_types import known_results
from mtp.mlx_models.trial import trial_problem
from mtp.mlx_models.weights import Stored, TensorPlan, join_ends, parameter_place, plan_tensors, stored_part
from proto.errors import CheckpointError
from proto.span import Span

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_experts_per_layer")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k")
_POSITIONS = ("max_position_embeddings", "max_sequence_length", "n_positions", "max_seq_len", "model_max_length")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers", "layer_types")
"""The names that model types have for these fields."""

_LAUNCHES = 1 / 16
"""Launches for each tensor of a layer, as a multiple of those of a layer of Qwen3.5: 10 us on a Mac. By the published
speeds of Llama-3.1-8B, Qwen3-8B, Qwen2.5-14B and Mistral-Small on an M3 Ultra, a tensor takes 8 to 12 us."""

_ROUTING = 7
"""Launches that choose and add the experts of a layer, as a number of tensors. By the published speeds of MiniMax-M2.5,
Qwen3-Coder-480B, gpt-oss-120b and Kimi-K2-Thinking these are 4 to 11."""

MOST_LAYERS = 1024
"""Layers of a model. Modules of more would take minutes and gigabytes before the tensors show that they are absent."""

MOST_POSITIONS = 2**20
"""Tokens of a sequence of a model that names no bound, such as a recurrent one."""


class MlxLmFamily(Family):
    """Any model of mlx-lm. `text` is the whole config.json, since each class reads its own fields."""

    releases = "any model of mlx-lm"
    model_types: ClassVar[dict[str, str]] = {}
    prefix = ""
    is_own = True
    as_published = True
    sees_images = False
    rules: ClassVar[Mapping[str, Rule]] = {"eos_token_id": ("nullable tokens", 0, 2**31)}
    parameters = (
        Parameter(r".*\.global_scale", keeps_type=True),
        Parameter(r".*(e_score_correction_bias|expert_bias|A_log|dt_bias)", keeps_type=True),
        Parameter(r".*\.(switch_mlp|switch_glu|experts)\..*", routed=True),
    )

    def serves(self, model_type: str) -> bool:
        """Return whether mlx-lm has a class for `model_type`."""
        return module_of(model_type) is not None

    # ---- fields

    def text_part(self, config: Text) -> Any:
        return {name: value for name, value in config.items() if not name.startswith("quantization")}

    def find_problem(self, text: Text) -> str | None:
        name = text["model_type"]
        tested = known_results().get(module_name(name))
        if tested and tested.refused:
            return _refusal(name, tested.refused)
        for field in _LAYERS:
            count = {**text, **_inner(text)}.get(field, 1)
            count = len(count) if isinstance(count, list) else count
            if type(count) is not int or not 1 <= count <= MOST_LAYERS:
                return f"{field} is {count!r:.60}, not a number from 1 to {MOST_LAYERS}"
        try:
            structure_of(text)
        except CheckpointError as error:
            return _refusal(name, str(error).removesuffix("."))
        reason = "" if tested else trial_problem(json.dumps(text, sort_keys=True))
        return _refusal(name, reason) if reason else None

    def announced_head_layers(self, text: Text) -> Any:
        return announced_layers(text)

    def sizes(self, text: Text) -> Sizes:
        plan, inner = structure_of(text), {**text, **_inner(text)}
        return Sizes(
            hidden=plan.hidden,
            layers=len(plan.layers),
            vocabulary=plan.vocabulary,
            positions=int(_first(inner, _POSITIONS) or MOST_POSITIONS),
            experts=int(_first(inner, _EXPERTS) or 0),
            is_tied=plan.is_tied,
        )

    def shape(self, text: Text) -> Shape:
        plan, inner = structure_of(text), {**text, **_inner(text)}
        experts, chosen = _first(inner, _EXPERTS), _first(inner, _CHOSEN)
        kinds = [kind_for_people(layer, plan.kinds) for layer in plan.layers]
        layers = tuple(
            LayerShape(kind, layer.token_values, *_window_or_state(kind, layer.sequence_values))
            for kind, layer in zip(kinds, plan.layers, strict=True)
        )
        return Shape(
            hidden=plan.hidden,
            layers=layers,
            head=head_shape(text) if announced_layers(text) else None,
            routed_share=min(1.0, chosen / experts) if experts and chosen else 1.0,
            launches=self._launches(plan),
            can_cut=False,
            quantizes_kv=False,
        )

    def _launches(self, plan: ModelStructure) -> float:
        places = [place for name, _ in plan.shapes if (place := parameter_place(plan, name))]
        own = [(part, name) for part, name in places if part.startswith("layers.")]
        routing = {part for part, name in own if self.rule(part, name).routed}
        return _LAUNCHES * (len(own) + _ROUTING * len(routing)) / len(plan.layers)

    def convert_text(self, text: Text) -> None:
        """Change nothing: other programs read the config as mlx-lm does."""

    # ---- names

    def place(self, local: str, text: Text) -> Place | None:
        part = stored_part(structure_of(text), local)
        return None if part is None else Place(part, local)

    def path(self, part: str, within: str) -> str:
        return f"{part}.{within}" if part.startswith("layers.") or part == "mtp" else within

    def module_path(self, text: Text, part: str, within: str) -> str:
        kind, _, number = part.partition(".")
        return f"{structure_of(text).paths[int(number)]}.{within}" if kind == "layers" else self.path(part, within)

    def plan_tensors(self, text: Text, stored: Stored) -> TensorPlan:
        plan = with_head if announced_layers(text) else plan_tensors
        return plan(text, structure_of(text), stored)

    def parameter_place(self, text: Text, name: str) -> tuple[str, str] | None:
        """Return the part of a parameter of `backbone`, and its name within the part."""
        return parameter_place(structure_of(text), name)

    # ---- modules

    def backbone(self, text: Text) -> nn.Module:
        return make_model(text)

    def layer(self, text: Text, index: int) -> nn.Module:
        return _shelf.take(text, [structure_of(text).paths[index]])[0]

    def part(self, text: Text, part: str) -> nn.Module | None:
        if part.startswith("layers.") or part == "mtp":
            return None
        paths = [path for path, its in structure_of(text).ends if its == part]
        holder: nn.Module = join_ends(paths, _shelf.take(text, paths), nn.Module())
        return holder

    def head(self, text: Text) -> NextNHead | None:
        return head_of(text)

    def stage_parts(self, text: Text, span: Span, parts: Mapping[str, Any]) -> StageParts:
        plan, skeleton = structure_of(text), Skeleton(text)
        for layer in span:
            skeleton.replace_module(plan.paths[layer], parts[f"layers.{layer}"])
        for path, part in plan.ends:
            if part in parts:
                module = parts[part]
                for name in path.split("."):
                    module = getattr(module, name)
                skeleton.replace_module(path, module)
        skeleton.model.eval()
        own = MlxLmSpan(skeleton, plan, span, _dtype_of([parts[f"layers.{layer}"] for layer in span]))
        ends = {part: skeleton.module(path) for path, part in plan.ends}
        unembedding = ends.get("lm_head", ends["embed"])
        if head := parts.get("mtp"):
            head.connect(text, ends["embed"], own.dtype)
            unembed = Unembedding(unembedding)
            return StageParts(own.layers, _as_column, ends["norm"], unembed, head)
        is_last = "norm" in parts
        return StageParts(
            layers=own.layers,
            embed=_as_column if span.start == 0 else None,
            norm=_unchanged if is_last else None,
            lm_head=Tail(skeleton, unembedding) if is_last else None,
        )


def _refusal(name: str, reason: str) -> str:
    return f"model_type {name} is not supported: {reason}. Use another model, or mlx-lm on one machine."


def _as_column(tokens: mx.array) -> mx.array:
    """Return tokens as rows `[rows, 1]`: the first layer asks the model for their embeddings."""
    return tokens[:, None]


def _unchanged(rows: mx.array) -> mx.array:
    """Return `rows`: the model computes its final norm with lm_head."""
    return rows


def _dtype_of(layers: Sequence[nn.Module]) -> mx.Dtype:
    """Return the type of activations: that of most values which are no packed weights."""
    count: Counter[mx.Dtype] = Counter()
    for layer in layers:
        for weight in dict(tree_flatten(layer.parameters())).values():
            if mx.issubdtype(weight.dtype, mx.floating):
                count[weight.dtype] += weight.size
    return count.most_common(1)[0][0]


def _window_or_state(kind: str, values: int) -> tuple[int, int]:
    """Return the values of a window of K/V, in the type of activations, and the bytes of a state, in fp32."""
    return (values, 0) if kind == "window" else (0, 4 * values)


def _inner(text: Text) -> Text:
    found = text.get("text_config") or text.get("llm_config")
    return found if isinstance(found, dict) else {}


def _first(text: Text, names: Sequence[str]) -> Any:
    return next((text[name] for name in names if type(text.get(name)) is int), None)


class _Shelf:
    """One model without weights, whose modules are taken one by one: making one takes a tenth of a second."""

    def __init__(self) -> None:
        self._key, self._modules = "", dict[str, nn.Module]()

    def take(self, text: Text, paths: Sequence[str]) -> list[nn.Module]:
        """Return the modules at `paths`, which are in no other model."""
        key = json.dumps(text, sort_keys=True)
        if key != self._key or not set(paths) <= self._modules.keys():
            self._key, self._modules = key, dict(make_model(text).named_modules())
        return [self._modules.pop(path) for path in paths]


_shelf = _Shelf()
