"""The MTP head of the NextN form: one more decoder layer of the model's class, with two norms and a product before it.

A publisher stores it as the layer after the last one. Its input is the model's state after the final norm, and in a
chain of drafts its own output after its norm, as in SGLang. vLLM continues a chain before this norm. Step's head reads
both before the norm, and has an lm_head of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mtp.checkpoint.families.fields import Text
from mtp.checkpoint.families.parameters import Source, add_one
from mtp.checkpoint.families.shape import LayerShape
from mtp.head.drafter import MTPHead
from mtp.layers.layer import Hole
from mtp.mlx_models.caches import is_trimmed
from mtp.mlx_models.layers import MlxLmSpan
from mtp.mlx_models.skeleton import Skeleton, make_model, module_name
from mtp.mlx_models.structure import ModelStructure, kind_for_people, structure_of
from mtp.mlx_models.weights import Stored, TensorPlan, name_in_head, plan_tensors
from proto.errors import CheckpointError
from proto.span import Span

USUAL: dict[str, int] = {
    **dict.fromkeys(("bailing_hybrid", "bailing_moe", "deepseek_v3", "deepseek_v32", "exaone_moe", "glm4_moe"), 0),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "step3p5"), 0),
    "mimo_v2_flash": 1,
}
"""The modules of mlx-lm whose models may have this head, with its layers where config.json does not name them."""

_SPAN = Span(1, 2)
"""The head's layer in the model of `head_config`. The layer before it makes it take hidden states in place of tokens.
"""

_LAYER = "layers.0."
"""The beginning of the names of the decoder layer within a head."""


def announced_layers(text: Text) -> int:
    """Return the number of layers of the head that config.json announces, 0 where its type cannot have one."""
    usual = USUAL.get(module_name(text["model_type"]))
    found: Any = text.get("mtp_num_hidden_layers", text.get("num_nextn_predict_layers", usual))
    return found if usual is not None and type(found) is int and found > 0 else 0


def head_config(text: Text) -> Text:
    """Return the config of a model of two layers, the second of which is the layer of the head."""
    count = text["num_hidden_layers"]
    lists = {name: value for name, value in text.items() if isinstance(value, list) and len(value) >= count}
    own: dict[str, Any] = {name: [value[0], (value[count:] or value[-1:])[0]] for name, value in lists.items()}
    if "first_k_dense_replace" in text:
        own["first_k_dense_replace"] = 0 if text["first_k_dense_replace"] <= count else _SPAN.end
    if "hybrid_layer_pattern" in text:  # MiMo-V2: a window and a dense MLP
        own |= {"hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 0]}
    if _is_step(text):  # a dense MLP
        own["moe_layers_enum"] = str(_SPAN.start - 1)
    if "mtp_layer_types" in text:  # EXAONE: a dense MLP. It has no RoPE beside layers with a window
        window, full = "sliding_attention", "full_attention"
        before = window if window in text["layer_types"] else full
        own |= {"layer_types": [before, text["mtp_layer_types"][0]], "is_moe_layer": [False, False]}
    return {**text, **own, "num_hidden_layers": _SPAN.end, "num_nextn_predict_layers": 0}


def _is_step(text: Text) -> bool:
    return module_name(text["model_type"]) == "step3p5"


class _HeadSkeleton(Skeleton):
    """The model of `head_config`. Layers with a window keep all tokens, which their masks hide, and so can be cut."""

    def new_caches(self) -> list[Any]:
        return [KVCache() if type(cache) is RotatingKVCache else cache for cache in super().new_caches()]


def head_shape(text: Text) -> LayerShape:
    """Return the state of the head's layer. Raises CheckpointError for one that cannot be cut."""
    config = head_config(text)
    plan, caches = structure_of(config), _HeadSkeleton(config).new_caches()
    layer = plan.layers[_SPAN.start]
    token = layer.token_values
    for place in layer.places:
        if not is_trimmed(caches[place]):
            raise CheckpointError(f"its MTP head has a state that cannot be cut: {plan.kinds[place]}")
        if window := re.search(r"'max_size': (\d+)", plan.kinds[place]):
            token += layer.sequence_values // int(window[1])
    return LayerShape(kind_for_people(layer, plan.kinds), token_values=token)


def with_head(text: Text, plan: ModelStructure, stored: Stored) -> TensorPlan:
    """Return the plan of all parameters of a model that has a head. Raises CheckpointError."""
    within = {name: found for name in stored if (found := name_in_head(plan, name)) is not None}
    model = plan_tensors(text, plan, {name: info for name, info in stored.items() if name not in within})
    structure = structure_of(head_config(text))
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
    if _is_step(text):  # A publisher's norms are offsets from 1. The class adds it where there are experts.
        for name, source in own.items():
            if "norm" in name and not source.stored[0].startswith("mtp."):
                own[name] = replace(source, transform=add_one)
    return replace(
        model,
        parts=model.parts | {"mtp": own},
        unknown=(*model.unknown, *unknown),
        ignored=(*model.ignored, *unused),
    )


class NextNHead(MTPHead):
    """The modules of the head. Its names are those of all heads, with the decoder layer of the model's own class."""

    reads_around_holes = False

    def __init__(self, text: Text) -> None:
        plan = structure_of(head_config(text))
        layer = dict(make_model(head_config(text)).named_modules())[plan.paths[_SPAN.start]]
        sizes: Any = SimpleNamespace(
            hidden_size=plan.hidden, rms_norm_eps=text.get("layernorm_epsilon", text.get("rms_norm_eps", 1e-6))
        )
        super().__init__(sizes, layer)

    def connect(self, text: Text, embed: Callable[[mx.array], mx.array], dtype: mx.Dtype) -> None:
        """Put the loaded layer into its place in the model, and take the embedding, which the head shares."""
        skeleton, plan = _HeadSkeleton(head_config(text)), structure_of(head_config(text))
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


class StepHead(NextNHead):
    """The modules of Step's head. The first of its layers drafts, also in a chain."""

    reads_streams = True

    def __init__(self, text: Text) -> None:
        super().__init__(text)
        self.lm_head = nn.Linear(self.width, text["vocab_size"], bias=False)

    def _after(self, rows: mx.array) -> mx.array:
        return rows

    def output(self, rows: mx.array) -> mx.array:
        normed: mx.array = self.norm(rows)
        return normed


def head_of(text: Text) -> NextNHead | None:
    """Return the modules of the head, None for a model without one."""
    if not announced_layers(text):
        return None
    return StepHead(text) if _is_step(text) else NextNHead(text)


class Unembedding:
    """lm_head, or the embedding that it is tied to, which no variant of a device replaces."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._multiply = module.as_linear if isinstance(module, nn.Embedding) else module

    def __call__(self, rows: mx.array) -> mx.array:
        """Return the logits `[rows, vocabulary]` of normalized `rows [rows, hidden]`."""
        logits: mx.array = self._multiply(rows)
        return logits
