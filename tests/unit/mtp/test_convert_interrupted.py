"""Conversions that stop or run out of disk space, and the peak memory of a conversion."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mtp.checkpoint.convert.convert import Quantization, Settings, convert
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import CheckpointError, UsageError
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import write_checkpoint
from tests.support.checkpoints.small_disk import ClaimedFreeSpace, small_disk

pytestmark = pytest.mark.thorough


def test_a_stopped_conversion_is_no_checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """config.json comes last. A directory that is in use, also by an unfinished conversion, is refused."""
    source, out = checkpoints(), tmp_path / "out"

    def stop_late(done: int, total: int) -> None:
        if done > total * 0.9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(Checkpoint.open(source), out, Settings(), stop_late, shard_bytes=50_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(out)
    with pytest.raises(UsageError, match="exists already"):
        convert(Checkpoint.open(source), out, Settings())


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
            convert(Checkpoint.open(source), disk / "other", Settings())
        assert not (disk / "other" / "config.json").exists()


@pytest.mark.parametrize(("fused", "bits"), [(True, 4), (False, 0)])
def test_peak_memory_is_that_of_the_largest_stack(tmp_path: Path, fused: bool, bits: int) -> None:
    """A checkpoint of at least 8 times its largest stack of experts converts with at most 3 stacks in memory."""
    source = write_checkpoint(
        tmp_path / "raw", moe=True, layers=4, hidden=384, fused_experts=fused, shards=2
    )
    checkpoint = Checkpoint.open(source)
    stacks: dict[str, int] = {}
    for name, info in checkpoint.tensors.items():
        key = re.sub(r"\.experts\.\d+", ".experts", name)
        stacks[key] = stacks.get(key, 0) + info.nbytes
    stack = max(stacks.values())
    assert sum(stacks.values()) >= 8 * stack
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    convert(checkpoint, tmp_path / "out", Settings(Quantization.of(bits, None) if bits else None))
    assert mx.get_peak_memory() - before <= 3 * stack
