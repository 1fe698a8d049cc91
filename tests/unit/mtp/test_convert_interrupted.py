"""Interrupted conversions: killed, out of disk space, repeated with other settings; and peak memory."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from mtp.checkpoint.convert.convert import Quantization, Settings, convert
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import CheckpointError, UsageError
from tests.conftest import Checkpoints
from tests.support.checkpoints import conversion_process
from tests.support.checkpoints.checkpoints import write_checkpoint
from tests.support.checkpoints.small_disk import ClaimedFreeSpace, small_disk

pytestmark = pytest.mark.thorough

SHARD_BYTES = 200_000


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture(scope="module")
def killed(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of a conversion that was killed after three complete files."""
    source, out = checkpoints(), tmp_path_factory.mktemp("killed") / "out"
    process = conversion_process.start(source, out, bits=4, shard_bytes=SHARD_BYTES // 4, files=3)
    end = time.monotonic() + 90
    while len(list(out.glob("*.safetensors"))) < 3:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.communicate()
    return out


@pytest.fixture
def out(killed: Path, tmp_path: Path) -> Path:
    """Return a copy of the unfinished conversion."""
    shutil.copytree(killed, tmp_path / "out")
    return tmp_path / "out"


def resumed(source: Path, out: Path, settings: Settings) -> Any:
    return convert(Checkpoint.open(source), out, settings, shard_bytes=SHARD_BYTES // 4)


def test_killed_and_given_again_it_goes_on(
    checkpoints: Checkpoints, tmp_path: Path, out: Path
) -> None:
    """Complete files are kept, the rest is written, and the result equals that of an uninterrupted run."""
    source, settings = checkpoints(), Settings(Quantization.of(4, None))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(out)
    before = {file: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
    outcome = resumed(source, out, settings)
    assert outcome.resumed == sum(
        info.nbytes for info in Checkpoint.open(out).tensors.values() if info.file in before
    )
    assert {file: file.stat().st_mtime_ns for file in before} == before
    resumed(source, tmp_path / "undisturbed", settings)
    assert content(out) == content(tmp_path / "undisturbed")


def test_an_unfinished_conversion_is_not_mixed_with_another(
    checkpoints: Checkpoints, out: Path
) -> None:
    """Other flags or another source are refused, as is a directory that is in use."""
    source = checkpoints()
    with pytest.raises(UsageError, match="unfinished conversion"):
        resumed(source, out, Settings(Quantization.of(8, None)))
    with pytest.raises(UsageError, match="unfinished conversion"):
        resumed(checkpoints(seed=1), out, Settings(Quantization.of(4, None)))
    resumed(source, out, Settings(Quantization.of(4, None)))
    with pytest.raises(UsageError, match="exists already"):
        resumed(source, out, Settings(Quantization.of(4, None)))


# ---- the disk


def test_a_disk_that_cannot_hold_the_output(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is reported before the first tensor is read, or when the disk fills during the conversion."""
    source = checkpoints()
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(CheckpointError, match=r"are needed, and the disk has .* left"):
            convert(Checkpoint.open(source), disk / "out", Settings())
        monkeypatch.setattr("shutil.disk_usage", lambda path: ClaimedFreeSpace())
        with pytest.raises(CheckpointError, match="the disk is full"):
            convert(Checkpoint.open(source), disk / "out", Settings())
        assert not (disk / "out" / "config.json").exists()


# ---- memory


@pytest.mark.parametrize(("fused", "bits"), [(True, 4), (False, 0)])
def test_peak_memory_is_that_of_the_largest_stack(tmp_path: Path, fused: bool, bits: int) -> None:
    """A checkpoint of at least 8 times its largest stack of experts converts with at most 3 stacks in memory."""
    source = write_checkpoint(
        tmp_path / "raw", moe=True, layers=4, hidden=768, fused_experts=fused, shards=2
    )
    tensors = Checkpoint.open(source).tensors
    stacks: dict[str, int] = {}
    for name, info in tensors.items():
        key = re.sub(r"\.experts\.\d+", ".experts", name)
        stacks[key] = stacks.get(key, 0) + info.nbytes
    stack = max(stacks.values())
    assert sum(info.nbytes for info in tensors.values()) >= 8 * stack
    process = conversion_process.start(source, tmp_path / "out", bits=bits)
    said, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    assert json.loads(said)["peak"] <= 3 * stack
