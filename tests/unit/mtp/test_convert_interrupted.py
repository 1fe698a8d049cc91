"""Conversions that are killed or run out of disk space, and the peak memory of a conversion."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from mtp.checkpoint.convert.convert import Settings, convert
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import CheckpointError, UsageError
from tests.conftest import Checkpoints
from tests.support.checkpoints import conversion_process
from tests.support.checkpoints.checkpoints import write_checkpoint
from tests.support.checkpoints.small_disk import ClaimedFreeSpace, small_disk

pytestmark = pytest.mark.thorough

SHARD_BYTES = 50_000


def test_a_killed_conversion_is_no_checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """config.json comes last. A directory that is in use, also by an unfinished conversion, is refused."""
    source, out = checkpoints(), tmp_path / "out"
    process = conversion_process.start(source, out, bits=4, shard_bytes=SHARD_BYTES, files=2)
    end = time.monotonic() + 90
    while len(list(out.glob("*.safetensors"))) < 2:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.communicate()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(out)
    with pytest.raises(UsageError, match="exists already"):
        convert(Checkpoint.open(source), out, Settings())


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
