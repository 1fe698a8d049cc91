"""Qwen3-Next and Qwen3-Coder-Next: the GatedDeltaNet has combined projections, and layers may be dense.

`in_proj_qkvz` and `in_proj_ba` hold the rows of one key head after another. The engine runs Qwen3.5's GatedDeltaNet,
whose projections are the same rows, quantized or not, in another order.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs
from mlx_lm.models.qwen3_next import Model, ModelArgs, Qwen3NextDecoderLayer

from mtp.checkpoint.families.fields import Text
from mtp.checkpoint.families.qwen3_5 import HybridFamily, model_args

_DEFAULTS: Text = {
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "intermediate_size": 0,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
"""The values of absent fields, as transformers has them. mlx-lm requires some, and has another `norm_topk_prob`."""


class Qwen3Next(HybridFamily):
    """Mixtures of experts without a vision part. Their config.json has all fields at the top level."""

    releases = "Qwen3-Next"
    model_types: ClassVar = {"qwen3_next": "qwen3_next"}
    head_types: ClassVar = {"qwen3_next_mtp": "qwen3_next"}
    prefix = ""

    def text_args(self, text: Text) -> TextModelArgs:
        """Return the arguments of Qwen3.5's modules for the same sizes."""
        return model_args({**_DEFAULTS, **text})

    def backbone(self, text: Text) -> nn.Module:
        return Model(self._model_args(text))

    def layer(self, text: Text, index: int) -> nn.Module:
        return Qwen3NextDecoderLayer(self._model_args(text), index)

    def engine_layer(self, text: Text, layer: nn.Module) -> nn.Module:
        """Return `layer` with separate projections in its GatedDeltaNet."""
        if layer.is_linear:
            layer.linear_attn = _separate(layer.linear_attn, self.text_args(text))
        return layer

    def find_own_problem(self, text: Text) -> str | None:
        text = {**_DEFAULTS, **text}
        dense, step = text["mlp_only_layers"], text["decoder_sparse_step"]
        if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
            return f"mlp_only_layers is {dense!r:.60}. It must be a list of layers."
        if type(step) is not int or step < 1:
            return f"decoder_sparse_step is {step!r:.60}. It must be a positive integer."
        if not isinstance(text["norm_topk_prob"], bool):
            return f"norm_topk_prob is {text['norm_topk_prob']!r:.60}. It must be true or false."
        return None

    def mlp_fields(self, text: Text) -> tuple[str, ...]:
        text = {**_DEFAULTS, **text}
        fields = super().mlp_fields(text)
        dense = text["mlp_only_layers"] or text["decoder_sparse_step"] != 1
        return (*fields, "intermediate_size") if dense and len(fields) > 1 else fields

    def announced_head_layers(self, text: Text) -> Any:
        """Return the announced number, or 1: published configs do not mention the published head."""
        found = super().announced_head_layers(text)
        return 1 if found is None else found

    def convert_text(self, text: Text) -> None:
        """Write the fields that mlx-lm reads at their older place, or with another default."""
        text.update(self._model_fields(text))

    def _model_args(self, text: Text) -> ModelArgs:
        found: ModelArgs = ModelArgs.from_dict(self._model_fields(text))
        return found

    def _model_fields(self, text: Text) -> Text:
        args = self.text_args(copy.deepcopy(text))
        scaling = dict(args.rope_scaling or {})
        return {
            **_DEFAULTS,
            **text,
            "head_dim": args.head_dim,
            "rope_theta": args.rope_theta,
            "partial_rotary_factor": args.partial_rotary_factor,
            "rope_scaling": None if scaling.get("type", "default") == "default" else scaling,
        }


def _separate(combined: nn.Module, args: TextModelArgs) -> GatedDeltaNet:
    """Return Qwen3.5's GatedDeltaNet with the weights of `combined`."""
    gdn = GatedDeltaNet(args)
    mx.eval(mx.random.state)  # the unused random weights of `gdn` have advanced it lazily
    for name in ("conv1d", "dt_bias", "A_log", "norm", "out_proj"):
        setattr(gdn, name, combined[name])
    heads, ratio = gdn.num_k_heads, gdn.num_v_heads // gdn.num_k_heads
    values = ratio * gdn.head_v_dim
    q, k, v, z = _rows_by_head(heads, (gdn.head_k_dim, gdn.head_k_dim, values, values))
    b, a = _rows_by_head(heads, (ratio, ratio))
    qkvz, ba = combined.in_proj_qkvz, combined.in_proj_ba
    rows = {"qkv": (qkvz, mx.concatenate([q, k, v])), "z": (qkvz, z), "b": (ba, b), "a": (ba, a)}
    gdn.update_modules({f"in_proj_{name}": _with_rows(*each) for name, each in rows.items()})
    return gdn


def _rows_by_head(heads: int, sizes: tuple[int, ...]) -> list[mx.array]:
    """Return the row numbers of each kind, when every head has `sizes` rows of the kinds in turn."""
    per_head = sum(sizes)
    rows = mx.arange(heads * per_head).reshape(heads, per_head)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return [part.reshape(-1) for part in mx.split(rows, ends, axis=1)]


def _with_rows(linear: nn.Module, rows: mx.array) -> nn.Module:
    """Return a linear layer, quantized or not, with `rows` of the outputs of `linear`."""
    found = copy.copy(linear)
    parameters = dict(tree_flatten(linear.parameters()))
    # A scale of the whole tensor stays as it is.
    picked = {n: p[rows] if p.ndim == 2 else p for n, p in parameters.items()}
    found.update(tree_unflatten(list(picked.items())))
    return found
