"""The verdict of `mtp-coord inspect` on a checkpoint's head is correct."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from coordinator.cli.model_commands import HeadHealth, assess_head
from coordinator.drafts.controller import MtpMode
from coordinator.schedule.local_generator import effective_mtp_mode
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.convert.add_head import plan_head_addition
from mtp.checkpoint.convert.convert import Settings, convert
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.parts import head_norms
from proto.errors import UsageError
from proto.span import Span
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import edit_tensors, read_tensors
from worker.model.loader import load_stage

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert the built-in model."""
    path = tmp_path_factory.mktemp("good") / "out"
    convert(Checkpoint.open(checkpoint_dir()), path, Settings(dtype="float32"))
    return path


def with_head(good: Path, path: Path, shift: float) -> Path:
    """Copy the checkpoint and add `shift` to the norms of its head."""
    shutil.copytree(good, path)
    head = mx.load(str(path / "mtp.safetensors"))
    assert isinstance(head, dict)
    mx.eval(head)
    moved = {n: w + shift if w.ndim == 1 else w for n, w in head.items()}
    mx.save_safetensors(str(path / "mtp.safetensors"), moved, {"format": "mlx"})
    return path


def examined(path: Path) -> HeadHealth:
    return assess_head(Checkpoint.open(path))


@pytest.mark.parametrize("path", [checkpoint_dir(), None], ids=["raw", "converted"])
def test_a_good_head_works(path: Path | None, good: Path) -> None:
    """The built-in model's head is complete, and its norms are right."""
    health = examined(path or good)
    assert health.works
    assert health.verdict == "head complete, and its norms look right"


def loaded_norms(path: Path) -> dict[str, mx.array]:
    """Return the norms of the head as the engine computes with them."""
    checkpoint = Checkpoint.open(path)
    whole = Span(0, checkpoint.config.num_layers)
    head = load_stage(checkpoint, whole, first=True, last=True, dtype=mx.float32).head
    assert head is not None
    return {name: w for name, w in dict(tree_flatten(head.parameters())).items() if w.ndim == 1}


def test_wrong_norms_are_found(good: Path, tmp_path: Path) -> None:
    """Norms to which 1 was added twice are suspected, with the repair hint."""
    path = with_head(good, tmp_path / "wrong", 1.0)
    found = examined(path)
    assert found.works is None
    assert found.verdict.startswith("norms look wrong")
    assert f"Run mtp-coord add-mtp --replace --mlx-path {path}" in found.verdict


def test_a_raw_head_beside_a_converted_model_loads_right(good: Path, tmp_path: Path) -> None:
    """Loading adds the 1 that the norms of a raw head lack, so it drafts as the converted one."""
    path = with_head(good, tmp_path / "raw head", -1.0)
    found = examined(path)
    assert found.works
    assert found.verdict.startswith("head complete: a head of another layout")
    assert_same_norms(path, good)


def assert_same_norms(path: Path, good: Path) -> None:
    right = loaded_norms(good)
    assert right
    for name, weight in loaded_norms(path).items():
        assert mx.allclose(weight, right[name], atol=1e-2), name


def test_a_raw_model_with_a_converted_head(tmp_path: Path, good: Path) -> None:
    """Loading does not add another 1 to the norms of a converted head in a raw model."""
    path = tmp_path / "mixed"
    shutil.copytree(checkpoint_dir(), path)
    norms = {n: w + 1 for n, w in read_tensors(path).items() if n.startswith("mtp.") and w.ndim == 1}
    edit_tensors(path, lambda weights: weights.update(norms))
    assert head_norms(Checkpoint.open(path)) == "shifted twice"
    assert examined(path).verdict.startswith("head complete: a head of another layout")
    assert_same_norms(path, good)


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
    names = gone or [name for name in read_tensors(path) if name.startswith("mtp.")]
    edit_tensors(path, lambda weights: [weights.pop(name) for name in names], "mlx")
    with pytest.raises(UsageError) as raised:
        effective_mtp_mode(Checkpoint.open(path), MtpMode(2))
    assert f"{words} {path} --hf-path RAW-CHECKPOINT. Or use --mtp off" in str(raised.value)


def test_a_raw_model_without_a_head_is_sent_to_add_mtp(tmp_path: Path, good: Path) -> None:
    """A fine-tuned model that was saved without its head gets the two commands, and they work."""
    path, out = tmp_path / "tuned", tmp_path / "out"
    shutil.copytree(checkpoint_dir(), path)
    names = [name for name in read_tensors(path) if name.startswith("mtp.")]
    edit_tensors(path, lambda weights: [weights.pop(name) for name in names])
    verdict = examined(path).verdict
    assert verdict.startswith(f"head missing. Run mtp-coord convert --hf-path {path} --mlx-path ")
    assert verdict.endswith("mtp-coord add-mtp --mlx-path DIRECTORY --hf-path RAW-CHECKPOINT")
    convert(Checkpoint.open(path), out, Settings(dtype="float32"))
    source = Checkpoint.open(checkpoint_dir())
    plan_head_addition(Checkpoint.open(out), source).write(source, lambda done, total: None)
    assert examined(out).works
