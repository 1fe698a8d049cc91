"""Whether an MTP head's norms are what they should be, as far as a look at them tells.

Published conversions got them wrong both ways: a raw head beside a converted model, whose offsets from 1 are taken for
weights, and weights that had 1 added twice. No tensor says by itself which it is (MTP_HEAD.md has the means), but the
head's layer is a layer like the model's own: its norms lie near those of the last attention layer, or 1 off. Only a
trial of the head is proof; `with_other_norms` is for that.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Literal

import mlx.core as mx

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.lazy_weights import read_part
from mtp.checkpoint.format.names import How, is_shifted_norm

Norms = Literal["as they should be", "not shifted", "shifted twice"]

_OFF = 0.6
"""Means differ by 1 where a shift is missing or doubled; between a right head and its model, by .3."""


def head_norms(checkpoint: Checkpoint) -> Norms:
    """What the head's norms look like, of a checkpoint whose head is complete. Reads a few vectors."""
    head = _norm_means(checkpoint, "mtp", "layers.0.")
    kinds = checkpoint.config.layer_kinds
    attention = [layer for layer, kind in enumerate(kinds) if kind == "attention"]
    if not attention:
        return "as they should be"
    twin = _norm_means(checkpoint, f"layers.{attention[-1]}", "")
    difference = median(head[name] - twin[name] for name in head)
    if difference < -_OFF or _all_negative(checkpoint):
        return "not shifted"
    return "shifted twice" if difference > _OFF else "as they should be"


def with_other_norms(checkpoint: Checkpoint) -> dict[Norms, Checkpoint]:
    """The same checkpoint read as if its head's norms were wrong, by the fault that each reading makes good."""
    if checkpoint.layout == "raw":
        return {"shifted twice": _with_norms(checkpoint, "as stored")}
    return {
        "not shifted": _with_norms(checkpoint, "norm + 1"),
        "shifted twice": _with_norms(checkpoint, "norm - 1"),
    }


def _with_norms(checkpoint: Checkpoint, how: How) -> Checkpoint:
    head = {
        name: replace(source, how=how) if is_shifted_norm("mtp", name) else source
        for name, source in checkpoint.plans["mtp"].items()
    }
    return replace(checkpoint, plans={**checkpoint.plans, "mtp": head})


def _norm_means(checkpoint: Checkpoint, part: str, prefix: str) -> dict[str, float]:
    """Mean of each norm of a layer, as it is used, by its name within the layer."""
    weights = read_part(checkpoint, part, mx.float32)
    return {
        name.removeprefix(prefix): float(mx.mean(weight))
        for name, weight in weights.items()
        if name.startswith(prefix) and is_shifted_norm(part, name)
    }


def _all_negative(checkpoint: Checkpoint) -> bool:
    """Of the 27B's raw embedding norm every offset is negative; a norm that is used so would turn its input over."""
    weight = read_part(checkpoint, "mtp", mx.float32)["pre_fc_norm_embedding.weight"]
    return float(mx.max(weight)) < 0
