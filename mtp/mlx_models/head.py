"""The MTP head of the NextN form: one more decoder layer of the model's class, with two norms and a product before it.

A publisher stores it as the layer after the last one. Its input is the model's state after the final norm, and in a
chain of drafts its own output after its norm, as in SGLang. vLLM continues a chain before this norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mtp.checkpoint.families.fields import Text
from mtp.checkpoint.families.parameters import Source
from mtp.checkpoint.families.shape import LayerShape
from mtp.head.drafter import MTPHead
from mtp.layers.layer import Hole
from mtp.mlx_models.layers import MlxLmSpan
from mtp.mlx_models.plan import ModelPlan, kind_for_people, plan_of
from mtp.mlx_models.skeleton import Skeleton, make_model, module_name
from mtp.mlx_models.weights import Stored, TensorPlan, name_in_head, plan_tensors
from proto.errors import CheckpointError
from proto.span import Span

TYPES = frozenset(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"))
"""The modules of mlx-lm whose models may have such a head."""

_SPAN = Span(1, 2)
"""The head's layer in the model of `head_config`. The layer before it makes it take hidden states in place of tokens.
"""

_LAYER = "layers.0."
"""The beginning of the names of the decoder layer within a head."""


def announced_layers(text: Text) -> int:
    """Return the number of layers of the head that config.json announces, 0 where its type cannot have one."""
    found: Any = text.get("mtp_num_hidden_layers", text.get("num_nextn_predict_layers"))
    is_known = module_name(text["model_type"]) in TYPES
    return found if is_known and type(found) is int and found > 0 else 0


def head_config(text: Text) -> Text:
    """Return the config of a model of two layers, the second of which is the layer of the head."""
    count = text["num_hidden_layers"]
    lists = {name: value for name, value in text.items() if isinstance(value, list) and len(value) >= count}
    dense = {"first_k_dense_replace": 0 if text.get("first_k_dense_replace", 0) <= count else 2}
    return {
        **text,
        **{name: [value[0], (value[count:] or value)[-1]] for name, value in lists.items()},
        **(dense if "first_k_dense_replace" in text else {}),
        "num_hidden_layers": _SPAN.end,
        "num_nextn_predict_layers": 0,
    }


def head_plan(text: Text) -> ModelPlan:
    """Return the structure of the model of `head_config`. Raises CheckpointError."""
    plan = plan_of(head_config(text))
    kinds = [plan.kinds[place] for place in plan.layers[_SPAN.start].places]
    parts = [part for kind in kinds for part in kind.removeprefix("list of ").split(", ")]
    if others := [part for part in parts if not part.startswith(KVCache.__name__)]:
        raise CheckpointError(f"its MTP head has a state that cannot be cut: {others[0]}")
    return plan


def head_shape(text: Text) -> LayerShape:
    """Return the state of the head's layer."""
    plan = head_plan(text)
    layer = plan.layers[_SPAN.start]
    return LayerShape(kind_for_people(layer, plan.kinds), token_values=layer.token_values)


def with_head(text: Text, plan: ModelPlan, stored: Stored) -> TensorPlan:
    """Return the plan of all parameters of a model that has a head. Raises CheckpointError."""
    within = {name: found for name in stored if (found := name_in_head(plan, name)) is not None}
    model = plan_tensors(text, plan, {name: info for name, info in stored.items() if name not in within})
    structure = head_plan(text)
    above = f"{structure.paths[_SPAN.start]}."
    names = {above + found.removeprefix(_LAYER): name for name, found in within.items() if found.startswith(_LAYER)}
    own = {found: Source((name,)) for name, found in within.items() if found and not found.startswith(_LAYER)}
    unused = [name for name, found in within.items() if not found]
    unknown: list[str] = []
    renamed = {new: stored[name] for new, name in names.items()}
    try:
        # The class treats the head's layer as its own: it stacks experts, and splits and joins what it does there.
        layer = plan_tensors(head_config(text), structure, renamed, alone=True)
    except CheckpointError:  # an expert is missing, and the model is complete without a head
        unused += names.values()
    else:
        for name, source in layer.parts.get(f"layers.{_SPAN.start}", {}).items():
            own[f"{_LAYER}{name}"] = replace(source, stored=tuple(names[one] for one in source.stored))
        unused += [names[name] for name in layer.ignored]
        unknown += [names[name] for name in layer.unknown]
    return replace(
        model,
        parts=model.parts | {"mtp": own},
        unknown=(*model.unknown, *unknown),
        ignored=(*model.ignored, *unused),
    )


class NextNHead(MTPHead):
    """The modules of the head. Its names are those of all heads, with the decoder layer of the model's own class."""

    drafts_on_device = False

    def __init__(self, text: Text) -> None:
        plan = head_plan(text)
        layer = dict(make_model(head_config(text)).named_modules())[plan.paths[_SPAN.start]]
        sizes: Any = SimpleNamespace(hidden_size=plan.hidden, rms_norm_eps=text.get("rms_norm_eps", 1e-6))
        super().__init__(sizes, layer)

    def connect(self, text: Text, embed: Callable[[mx.array], mx.array], dtype: mx.Dtype) -> None:
        """Put the loaded layer into its place in the model, and take the embedding, which the head shares."""
        skeleton, plan = Skeleton(head_config(text)), head_plan(text)
        skeleton.replace_module(plan.paths[_SPAN.start], self.layers[0])
        skeleton.model.eval()
        self.block = MlxLmSpan(skeleton, plan, _SPAN, dtype).layers[0]
        self._embed = embed

    def advance(
        self,
        embedded: mx.array,
        hidden: mx.array,
        caches: Sequence[Any],
        widths: Sequence[int],
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        """See `MTPHead.advance`. `embedded` are tokens `[rows, 1]`, since the stage's first layer takes these."""
        self.block.enter(hidden, [[cache] for cache in caches], widths)
        return super().advance(self._embed(embedded[:, 0]), hidden, caches, widths, holes)


class Unembedding:
    """lm_head, or the embedding that it is tied to, which no variant of a device replaces."""

    def __init__(self, module: nn.Module) -> None:
        self._multiply = module.as_linear if isinstance(module, nn.Embedding) else module

    def __call__(self, rows: mx.array) -> mx.array:
        """Return the logits `[rows, vocabulary]` of normalized `rows [rows, hidden]`."""
        logits: mx.array = self._multiply(rows)
        return logits
