"""The output of `mtp-coord inspect` agrees with what the loader loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from coordinator.cli.model_commands import inspect
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.span import Span
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import without, write_checkpoint
from worker.model.loader import load_stage


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a terminal width at which no line wraps."""
    monkeypatch.setenv("COLUMNS", "200")


def _facts(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    inspect(model=str(path), json=True)
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_json_has_the_promised_keys(checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON object has the keys that scripts read, with the values of the fixture."""
    facts = _facts(checkpoints(moe=True, layout="mlx", quantize=4, overrides=True), capsys)
    assert facts["model_type"] == "qwen3_5_moe"
    assert facts["num_layers"] == 8
    assert facts["layer_kinds"] == ["gdn", "gdn", "gdn", "attention"] * 2
    quantization = facts["quantization"]
    assert (quantization["bits"], quantization["group_size"]) == (4, 64)
    assert quantization["overrides"]["layers.0.mlp.gate"]["bits"] == 8
    assert quantization["overrides"]["mtp.layers.0.mlp.gate"]["bits"] == 8
    assert facts["norms"] == "shifted"
    assert facts["mtp"] == {"announced": True, "present": True, "complete": True, "missing": []}
    parts = {"embed", "norm", "lm_head", "mtp", "layers", "rows_on_disk", "vision", "total"}
    assert set(facts["bytes"]) == parts


@pytest.mark.parametrize("options", [{}, {"tie": False}, {"moe": True, "tie": False}], ids=repr)
def test_parameters_are_those_the_loader_builds(
    checkpoints: Checkpoints, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of parameters equals that of a loaded model with its head, also for a quantized copy."""
    raw = checkpoints(**options)
    stage = load_stage(Checkpoint.open(raw), Span(0, 8), first=True, last=True, dtype=None)
    layers: list[Any] = stage.layers
    modules = [
        stage.embed_tokens,
        stage.norm,
        stage.lm_head,
        stage.head,
        *(x.module for x in layers),
    ]
    arrays = dict(tree_flatten([m.parameters() for m in modules if m is not None])).values()
    assert _facts(raw, capsys)["parameters"] == sum(w.size for w in arrays)
    quantized = checkpoints(**options, layout="mlx", quantize=4)
    assert _facts(quantized, capsys)["parameters"] == _facts(raw, capsys)["parameters"]


def test_a_model_that_is_not_whole_is_shown_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing tensors are named in JSON and in the verdict."""
    whole = write_checkpoint(tmp_path / "m", tie=False)
    assert _facts(whole, capsys)["missing_tensors"] == []
    gone = [
        "lm_head.weight",
        "model.language_model.layers.1.mlp.up_proj.weight",
        "model.language_model.layers.7.self_attn.q_norm.weight",
    ]
    path = without(whole, *gone)
    facts = _facts(path, capsys)
    names = {name.removeprefix("model.language_model.") for name in gone}
    assert set(facts["missing_tensors"]) == names
    assert facts["health"]["works"] is False
    assert "lm_head.weight are missing" in facts["health"]["verdict"]
    inspect(model=str(path))
    assert "lm_head.weight are missing" in capsys.readouterr().out
