"""The fused layers of CPUs compute what the reference does, and give a row the same bits in every frame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.device import this_device
from mtp.layers.layer import KVFormat
from mtp.layers.linear import COLUMNS
from proto.frame import Admit, Segment
from proto.span import Span
from tests.conftest import Checkpoints
from tests.support.stages.chain import random_tokens
from worker.model import layer_variants
from worker.model.loader import load_stage
from worker.model.stage import StageForward

LAYERS = 4
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"tie": False},
    "bfloat16": {"dtype": mx.bfloat16},
    "4 bits": {"layout": "mlx", "quantize": 4, "hidden": 128},
    "experts": {"moe": True},
}
MOST = 70
"""Rows of the longest frame. It is above every bound of compiled functions and sorted experts."""

EVERY = tuple(range(1, MOST + 1))

SOME = (2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64, 65, MOST)

TOKENS = random_tokens(MOST + 1, seed=3)


def stage_of(path: Path, **options: Any) -> StageForward:
    span = Span(0, LAYERS)
    return StageForward(
        load_stage(Checkpoint.open(path), span, first=True, last=True, dtype=None), KVFormat(), **options
    )


def logits_of(stage: StageForward, frames: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """Return the logits of each of the sequences, which have so many rows in each of the frames."""
    modules: Any = stage.modules
    unembed = modules.lm_head or modules.embed_tokens.as_linear
    sequences = [stage.new_sequence(Admit(i, 128, MOST)) for i in range(len(frames[0]))]
    found: list[list[mx.array]] = [[] for _ in sequences]
    places = [0] * len(sequences)
    for number, widths in enumerate(frames):
        runs = []
        for i, width in enumerate(widths):
            own = tuple(TOKENS[places[i] : places[i] + width])
            runs.append((sequences[i], Segment(i, number, places[i], own, open=False)))
            places[i] += width
        tokens = mx.array([token for _, segment in runs for token in segment.tokens])
        rows = unembed(modules.norm(stage.forward(stage.embed(tokens), runs)))
        ends = [sum(widths[: i + 1]) for i in range(len(widths))]
        for own_rows, end, width in zip(found, ends, widths, strict=True):
            own_rows.append(rows[end - width : end])
        mx.eval(found)
    return [mx.concatenate(rows) for rows in found]


@pytest.mark.parametrize("widths", [SOME, pytest.param(EVERY, marks=pytest.mark.thorough)], ids=["some", "all"])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_frames_of_every_width(
    checkpoints: Checkpoints, form: str, widths: tuple[int, ...]
) -> None:
    """The logits of a token do not depend on the rows of its own sequence or of another one that run with it."""
    stage = stage_of(checkpoints(layers=LAYERS, **FORMS[form]))
    assert stage.variants.summary == f"{LAYERS} fused"
    expected, _ = logits_of(stage, [(1, 1)] * MOST)
    for width in widths:
        found, beside = logits_of(stage, [(width, 1)])
        assert mx.array_equal(found, expected[:width]).item(), f"{width} rows"
        assert mx.array_equal(beside, expected[:1]).item(), f"beside {width} rows"


@pytest.mark.parametrize("form", FORMS)
def test_fused_layers_compute_what_the_reference_does(checkpoints: Checkpoints, form: str) -> None:
    path = checkpoints(layers=LAYERS, **FORMS[form])
    frames = [(9, 6), (1, 4), (3, 1)]
    fused, reference = stage_of(path), stage_of(path, exact=True)
    assert reference.variants.summary == f"{LAYERS} reference, exact"
    for found, expected in zip(logits_of(fused, frames), logits_of(reference, frames), strict=True):
        limit = 1e-5 if found.dtype == mx.float32 else 0.1
        assert (mx.abs(found - expected).max() <= limit * mx.abs(expected).max()).item()


def columns_of(stage: StageForward) -> dict[str, bool]:
    """Return which products of a GatedDeltaNet layer and of the vocabulary are stored by columns."""
    layer: Any = stage.modules.layers[0]
    products = {"out": layer.mixer.net.out_proj, "lm_head": stage.modules.lm_head}
    found = {name: getattr(getattr(one, "format", None), "mode", "") == COLUMNS for name, one in products.items()}
    return found | {"mlp": COLUMNS in [form.mode for form in layer.mlp.formats]}


@pytest.mark.skipif(not this_device().stores_columns, reason="another BLAS")
@pytest.mark.parametrize("tie", [False, True])
def test_a_large_half_precision_checkpoint_is_not_widened(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Checkpoints, tie: bool
) -> None:
    """Half-precision weights become fp32 up to a size of the checkpoint; fp32 ones have it anyway."""
    halves, whole = (checkpoints(layers=LAYERS, tie=tie, dtype=dtype) for dtype in (mx.bfloat16, mx.float32))
    every = dict.fromkeys(("out", "lm_head", "mlp"), True)
    small = stage_of(halves)
    assert columns_of(small) == every
    monkeypatch.setattr(layer_variants, "WIDENED_BYTES", small.modules.model_bytes - 1)
    assert columns_of(stage_of(halves)) == dict.fromkeys(every, False)
    # The embedding stays beside the columns of lm_head, which would be a second copy of a large array.
    assert columns_of(stage_of(whole)) == every | {"lm_head": not tie}


def test_fused_weights_are_held_once(checkpoints: Checkpoints) -> None:
    """The modules of mlx-lm have no weights of products that a fused layer computes."""
    stage = stage_of(checkpoints(layers=LAYERS, **FORMS["fp32"]))
    layers: Any = stage.modules.layers
    for module in [layer.module for layer in layers]:
        mixer = module.linear_attn if module.is_linear else module.self_attn
        for owner in (mixer, module.mlp):
            linear = {name: child for name, child in owner.children().items() if name.endswith("proj")}
            assert not [name for name, child in linear.items() if "weight" in child]
