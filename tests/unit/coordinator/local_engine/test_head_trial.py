"""The verdict of `mtp-coord inspect` on a checkpoint's head is correct."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from coordinator.cli.inspect_command import inspect
from coordinator.local_engine.generator import effective_mtp_mode
from coordinator.local_engine.head_trial import HeadAssessment, Trial, assess_head
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.convert.convert import convert
from mtp.checkpoint.convert.settings import Settings
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.head_norms import head_norms
from mtp.depth.controller import MtpMode
from proto.errors import UsageError
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import read_tensors

TOKENS = 48
"""Half of the usual trial, to save time."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert the built-in model."""
    path = tmp_path_factory.mktemp("good") / "out"
    convert(Checkpoint.open(checkpoint_dir()), path, Settings(dtype="float32"))
    return path


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.local_engine.head_trial.TOKENS", TOKENS)


def with_head(good: Path, path: Path, shift: float) -> Path:
    """Copy the checkpoint and add `shift` to the norms of its head."""
    shutil.copytree(good, path)
    head = mx.load(str(path / "mtp.safetensors"))
    assert isinstance(head, dict)
    mx.eval(head)
    moved = {n: w + shift if w.ndim == 1 else w for n, w in head.items()}
    mx.save_safetensors(str(path / "mtp.safetensors"), moved, {"format": "mlx"})
    return path


def examined(path: Path, *, trial: bool = True) -> HeadAssessment:
    return assess_head(Checkpoint.open(path), trial=trial, on_progress=lambda done, total: None)


@pytest.mark.parametrize("path", [checkpoint_dir(), None], ids=["raw", "converted"])
def test_a_good_head_works(path: Path | None, good: Path) -> None:
    """The built-in model's head works, and acceptance falls with the position of a draft."""
    assessment = examined(path or good)
    assert assessment.works
    assert assessment.verdict.startswith("MTP will work: by position, ")
    assert assessment.norms == "as they should be"
    assert assessment.trial is not None
    first, second, third = assessment.trial.acceptance
    assert 0.7 < first <= 1
    assert first >= second >= third > 0.4
    assert sum(assessment.trial.accepted) + assessment.trial.drafted[0] >= TOKENS - 4


@pytest.mark.parametrize(
    ("shift", "norms", "words"),
    [
        (-1.0, "not shifted", "norms look unshifted: the head is raw"),
        (1.0, "shifted twice", "norms look double-shifted"),
    ],
)
def test_wrong_norms_are_found_and_proved(
    good: Path, tmp_path: Path, shift: float, norms: str, words: str
) -> None:
    """Without a trial, wrong norms are suspected. A trial proves it. Both verdicts contain the repair hint."""
    path = with_head(good, tmp_path / "wrong", shift)
    hint = f"Run mtp-coord add-mtp --replace --mlx-path {path}"
    looked = examined(path, trial=False)
    assert looked.works is None
    assert looked.norms == norms
    assert looked.verdict.startswith(words)
    assert hint in looked.verdict
    tried = examined(path)
    assert tried.norms == norms
    assert tried.verdict.startswith(words)
    assert "With the norms read the other way" in tried.verdict
    assert hint in tried.verdict


def test_a_raw_model_with_a_converted_head(tmp_path: Path, good: Path) -> None:
    """A converted head in a raw model is reported, because its norms would be shifted twice."""
    path = tmp_path / "mixed"
    shutil.copytree(checkpoint_dir(), path)
    weights = read_tensors(path)
    moved = {n: w + 1 if n.startswith("mtp.") and w.ndim == 1 else w for n, w in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), moved, {"format": "pt"})
    assert head_norms(Checkpoint.open(path)) == "shifted twice"
    verdict = examined(path).verdict
    assert verdict.startswith("norms look double-shifted: by position, ")
    assert "of the first drafts were accepted. Download the checkpoint again" in verdict


def test_another_models_head(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head with right norms and rejected drafts is reported as one of another model."""
    monkeypatch.setattr(
        "coordinator.local_engine.head_trial.TOKENS", 16
    )  # three trials, and each token is a pass
    path = tmp_path / "other"
    shutil.copytree(good, path)
    head = mx.load(str(path / "mtp.safetensors"))
    assert isinstance(head, dict)
    mx.eval(head)
    fc = next(name for name in head if name.endswith("fc.weight"))
    head[fc] = head[fc][:, ::-1]
    mx.save_safetensors(str(path / "mtp.safetensors"), head, {"format": "mlx"})
    assessment = examined(path)
    assert assessment.works is False
    assert assessment.norms == "as they should be"
    assert "It may belong to another model" in assessment.verdict


def test_missing_and_incomplete_heads_say_what_to_run(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """The verdict contains a command to copy. A raw checkpoint must be downloaded again."""
    converted = checkpoints(mtp=False, layout="mlx")
    verdict = examined(converted).verdict
    assert verdict.startswith(f"head missing. Run mtp-coord add-mtp --mlx-path {converted}")
    assert examined(checkpoints(mtp=False)).verdict == (
        "head missing. Download the checkpoint again, or use the one that Qwen publishes"
    )
    path = tmp_path / "incomplete"
    shutil.copytree(checkpoints(layout="mlx"), path)
    weights = read_tensors(path)
    del weights["mtp.fc.weight"]
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    verdict = examined(path).verdict
    assert verdict.startswith("head incomplete, it lacks mtp.fc.weight. Run mtp-coord add-mtp --re")


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        (["mtp.fc.weight"], "Missing: mtp.fc.weight. Run mtp-coord add-mtp --replace --mlx-path"),
        (None, "Missing: all 15 mtp.* tensors. Run mtp-coord add-mtp --mlx-path"),
    ],
)
def test_drafts_without_a_complete_head_are_refused_with_a_repair_hint(
    checkpoints: Checkpoints, tmp_path: Path, gone: list[str] | None, words: str
) -> None:
    """`--mtp 2` fails with the repair hint of inspect, with --replace if part of the head is present."""
    path = tmp_path / "lost"
    shutil.copytree(checkpoints(layout="mlx"), path)
    weights = read_tensors(path)
    for name in gone or [name for name in weights if name.startswith("mtp.")]:
        del weights[name]
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    with pytest.raises(UsageError) as raised:
        effective_mtp_mode(Checkpoint.open(path), MtpMode(2))
    assert f"{words} {path} --hf-path RAW-CHECKPOINT. Or use --mtp off" in str(raised.value)


@pytest.mark.parametrize("layout", ["raw", "mlx"])
def test_random_heads_look_right(checkpoints: Checkpoints, layout: str) -> None:
    """Equally distributed norms of head and model are right, whatever their mean."""
    assert head_norms(Checkpoint.open(checkpoints(layout=layout))) == "as they should be"


def test_without_a_trial_it_says_why(
    checkpoints: Checkpoints, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tokenizer, memory or a request for it, there is no trial and no promise."""
    assert "no tokenizer.json" in examined(checkpoints()).verdict
    assert "--no-trial was given" in examined(good, trial=False).verdict
    monkeypatch.setattr("coordinator.local_engine.head_trial.MEMORY_SHARE", 1e-9)
    assessment = examined(good)
    assert assessment.works is None
    assert "of memory is free" in assessment.verdict
    assert assessment.verdict.startswith("head complete, and its norms look right. Not tried: ")


def test_acceptance_by_position() -> None:
    """Positions that no window reached are left out."""
    assert Trial((10, 8, 0), (5, 2, 0)).acceptance == (0.5, 0.25)
    assert Trial((), ()).first == 0.0


def test_inspect_shows_it(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict is the last line of the table and the field `health` of the JSON object."""
    inspect(str(good), as_json=True)
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert facts["health"]["works"] is True
    assert len(facts["health"]["acceptance"]) == 3
    assert facts["packed"] == {}
    inspect(str(good), no_trial=True)
    assert "Not tried: --no-trial was given" in capsys.readouterr().out.splitlines()[-1]


def test_packing_by_part(checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    """Routers and modules with their own setting are counted separately."""
    path = checkpoints(moe=True, layout="mlx", quantize=4, overrides=True)
    capsys.readouterr()
    inspect(str(path), as_json=True)
    packed = json.loads(capsys.readouterr().out)["packed"]
    assert packed["layers"]["8 bit"] == 2 * 8 + 4
    assert packed["layers"]["unquantized"] == 2
    assert packed["mtp"] == {"4 bit": 9, "8 bit": 2, "unquantized": 2}
