"""The command line of `mtp-coord convert`."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli import import_command
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import UsageError
from tests.conftest import Checkpoints


def command(*args: str | Path) -> None:
    import_command("convert").main([str(arg) for arg in args], standalone_mode=False)


def test_mlx_lms_own_flags(checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line for mlx_lm.convert works, and the output tells whether the head was kept."""
    out = tmp_path / "out"
    flags = ("-q", "--q-bits", "8", "--q-group-size", "32", "--dtype", "bfloat16")
    command("--hf-path", checkpoints(), "--mlx-path", out, *flags)
    assert Checkpoint.open(out).config.quantization == {
        "bits": 8,
        "group_size": 32,
        "mode": "affine",
    }
    said = capsys.readouterr().out
    assert "MTP head: kept" in said
    assert "M1" in said


def test_a_source_without_a_head_is_reported(
    checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a source without a head, the output names the command that adds one."""
    command("--model", checkpoints(mtp=False), "--mlx-path", tmp_path / "out")
    said = capsys.readouterr().out
    assert "mtp-coord add-mtp" in said
    assert "M1" not in said


@pytest.mark.parametrize("flag", [("--q-bits", "8"), ("--q-group-size", "32"), ("--q-mode", "mxfp4")])
def test_a_flag_without_effect_is_refused(checkpoints: Checkpoints, tmp_path: Path, flag: tuple[str, str]) -> None:
    """A quantization flag without --quantize is an error. mlx-lm would ignore it."""
    with pytest.raises(UsageError, match=f"{flag[0]} needs --quantize"):
        command("--hf-path", checkpoints(), "--mlx-path", tmp_path / "out", *flag)
