"""`mtp-coord inspect` says in words whether drafting will work, and is right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from coordinator.cli.inspect_command import inspect
from coordinator.local_engine.generator import mtp_in_force
from coordinator.local_engine.head_trial import Checkup, Trial, check
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
"""Half of the usual trial."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, converted."""
    path = tmp_path_factory.mktemp("good") / "out"
    convert(Checkpoint.open(checkpoint_dir()), path, Settings(dtype="float32"))
    return path


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.local_engine.head_trial.TOKENS", TOKENS)


def with_head(good: Path, path: Path, shift: float) -> Path:
    """A copy whose head's norms have `shift` added."""
    shutil.copytree(good, path)
    head = mx.load(str(path / "mtp.safetensors"))
    assert isinstance(head, dict)
    mx.eval(head)
    moved = {n: w + shift if w.ndim == 1 else w for n, w in head.items()}
    mx.save_safetensors(str(path / "mtp.safetensors"), moved, {"format": "mlx"})
    return path


def examined(path: Path, *, trial: bool = True) -> Checkup:
    return check(Checkpoint.open(path), trial=trial, on_progress=lambda done, total: None)


@pytest.mark.parametrize("path", [checkpoint_dir(), None], ids=["raw", "converted"])
def test_a_good_head_works(path: Path | None, good: Path) -> None:
    """Tried on the built-in text; by position, fewer are kept the further they reach."""
    checkup = examined(path or good)
    assert checkup.works
    assert checkup.verdict.startswith("MTP will work: by position, ")
    assert checkup.norms == "as they should be"
    assert checkup.trial is not None
    first, second, third = checkup.trial.acceptance
    assert 0.7 < first <= 1
    assert first >= second >= third > 0.4
    assert sum(checkup.trial.accepted) + checkup.trial.drafted[0] >= TOKENS - 4


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
    """By a look alone as a suspicion; by a trial with a proof, and in both cases with what to do."""
    path = with_head(good, tmp_path / "wrong", shift)
    remedy = f"Run mtp-coord add-mtp --replace --mlx-path {path}"
    looked = examined(path, trial=False)
    assert looked.works is None
    assert looked.norms == norms
    assert looked.verdict.startswith(words)
    assert remedy in looked.verdict
    tried = examined(path)
    assert tried.norms == norms
    assert tried.verdict.startswith(words)
    assert "were they read the other way" in tried.verdict
    assert remedy in tried.verdict


def test_a_raw_model_with_a_converted_head(tmp_path: Path, good: Path) -> None:
    """The other mixture: the head's weights get the 1 that they have already."""
    path = tmp_path / "mixed"
    shutil.copytree(checkpoint_dir(), path)
    weights = read_tensors(path)
    moved = {n: w + 1 if n.startswith("mtp.") and w.ndim == 1 else w for n, w in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), moved, {"format": "pt"})
    assert head_norms(Checkpoint.open(path)) == "shifted twice"
    verdict = examined(path).verdict
    assert verdict.startswith("norms look double-shifted: by position, ")
    assert "were they read the other way. Download the checkpoint again" in verdict


def test_another_models_head(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norms are right, and its drafts are not."""
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
    checkup = examined(path)
    assert checkup.works is False
    assert checkup.norms == "as they should be"
    assert "is it another model's?" in checkup.verdict


def test_missing_and_incomplete_heads_say_what_to_run(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """The command is there to be copied; a raw checkpoint is to be had anew."""
    converted = checkpoints(mtp=False, layout="mlx")
    verdict = examined(converted).verdict
    assert verdict.startswith(f"head missing. Run mtp-coord add-mtp --mlx-path {converted}")
    assert examined(checkpoints(mtp=False)).verdict == (
        "head missing. Download the checkpoint again, or take the one Qwen publishes"
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
        (["mtp.fc.weight"], "it lacks mtp.fc.weight. Run mtp-coord add-mtp --replace --mlx-path"),
        (None, "it lacks all 15 mtp.* tensors. Run mtp-coord add-mtp --mlx-path"),
    ],
)
def test_drafts_that_a_head_cannot_give_are_refused_with_what_to_run(
    checkpoints: Checkpoints, tmp_path: Path, gone: list[str] | None, words: str
) -> None:
    """`--mtp 2` has the sentence that inspect has; what is there of the head is to be replaced."""
    path = tmp_path / "lost"
    shutil.copytree(checkpoints(layout="mlx"), path)
    weights = read_tensors(path)
    for name in gone or [name for name in weights if name.startswith("mtp.")]:
        del weights[name]
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    with pytest.raises(UsageError) as raised:
        mtp_in_force(Checkpoint.open(path), MtpMode(2))
    assert f"{words} {path} --hf-path RAW-CHECKPOINT. Or use --mtp off" in str(raised.value)


@pytest.mark.parametrize("layout", ["raw", "mlx"])
def test_random_heads_look_right(checkpoints: Checkpoints, layout: str) -> None:
    """Norms drawn alike for head and model raise no suspicion, wherever their means are."""
    assert head_norms(Checkpoint.open(checkpoints(layout=layout))) == "as they should be"


def test_without_a_trial_it_says_why(
    checkpoints: Checkpoints, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tokenizer, no room, or not asked for: never a promise that was not tested."""
    assert "no tokenizer.json" in examined(checkpoints()).verdict
    assert "no trial was asked for" in examined(good, trial=False).verdict
    monkeypatch.setattr("coordinator.local_engine.head_trial.MEMORY_SHARE", 1e-9)
    checkup = examined(good)
    assert checkup.works is None
    assert "of memory are free" in checkup.verdict
    assert checkup.verdict.startswith("head complete, and its norms look right. Not tried: ")


def test_acceptance_by_position() -> None:
    """Positions that no window reached are not there."""
    assert Trial((10, 8, 0), (5, 2, 0)).acceptance == (0.5, 0.25)
    assert Trial((), ()).first == 0.0


def test_inspect_shows_it(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the last line, and under `health` in JSON; each part's quantization beside it."""
    inspect(str(good), as_json=True)
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert facts["health"]["works"] is True
    assert len(facts["health"]["acceptance"]) == 3
    assert facts["packed"] == {}
    inspect(str(good), no_trial=True)
    assert "Not tried: no trial was asked for" in capsys.readouterr().out.splitlines()[-1]


def test_packing_by_part(checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    """Routers and exceptions by path are told apart."""
    path = checkpoints(moe=True, layout="mlx", quantize=4, overrides=True)
    capsys.readouterr()
    inspect(str(path), as_json=True)
    packed = json.loads(capsys.readouterr().out)["packed"]
    assert packed["layers"]["8 bit"] == 2 * 8 + 4
    assert packed["layers"]["unquantized"] == 2
    assert packed["mtp"] == {"4 bit": 9, "8 bit": 2, "unquantized": 2}
