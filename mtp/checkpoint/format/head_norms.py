"""A plausibility check of the norms of an MTP head.

Published conversions have two faults. In the first, a raw head lies beside a converted model, and its offsets from 1
are used as weights. In the second, 1 was added to the weights twice. No single tensor shows which case it is
(MTP_HEAD.md has the means). But the layer of the head resembles the layers of the model: its norms are close to those
of the last attention layer, or differ by 1. Only a trial of the head is a proof; `with_other_norms` serves for it.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Literal

import mlx.core as mx

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.lazy_weights import read_part
from mtp.checkpoint.format.names import Transform, is_shifted_norm

Norms = Literal["as they should be", "not shifted", "shifted twice"]

_OFF = 0.6
"""Difference of the means above which a shift is missing or doubled. A fault gives 1, a correct head up to .3."""


def head_norms(checkpoint: Checkpoint) -> Norms:
    """Return the verdict on the norms of a complete head. Reads a few vectors."""
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
    """Return the checkpoint with the head's norms read in another way, by the fault that this reading corrects."""
    if checkpoint.layout == "raw":
        return {"shifted twice": _with_norms(checkpoint, "as stored")}
    return {
        "not shifted": _with_norms(checkpoint, "norm + 1"),
        "shifted twice": _with_norms(checkpoint, "norm - 1"),
    }


def _with_norms(checkpoint: Checkpoint, transform: Transform) -> Checkpoint:
    head = {
        name: replace(source, transform=transform) if is_shifted_norm("mtp", name) else source
        for name, source in checkpoint.plans["mtp"].items()
    }
    return replace(checkpoint, plans={**checkpoint.plans, "mtp": head})


def _norm_means(checkpoint: Checkpoint, part: str, prefix: str) -> dict[str, float]:
    """Return the mean of each norm of a layer, as the layer uses it, by its name within the layer."""
    weights = read_part(checkpoint, part, mx.float32)
    return {
        name.removeprefix(prefix): float(mx.mean(weight))
        for name, weight in weights.items()
        if name.startswith(prefix) and is_shifted_norm(part, name)
    }


def _all_negative(checkpoint: Checkpoint) -> bool:
    """Return whether every weight of the embedding norm is negative, which would invert the sign of its input.

    The raw offsets of the 27B's embedding norm are all negative.
    """
    weight = read_part(checkpoint, "mtp", mx.float32)["pre_fc_norm_embedding.weight"]
    return float(mx.max(weight)) < 0
