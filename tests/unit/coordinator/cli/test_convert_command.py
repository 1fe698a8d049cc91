"""The command line of `mtp-coord convert`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.cli import import_command
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import CheckpointError, UsageError
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import write_checkpoint


def command(*args: str | Path) -> None:
    import_command("convert").main([str(arg) for arg in args], standalone_mode=False)


def test_mlx_lms_own_flags(
    checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_what_a_tokenizer_is_made_of_is_copied_as_it_is(tmp_path: Path) -> None:
    """Files of the tokenizer are copied byte by byte."""
    source, out = write_checkpoint(tmp_path / "raw"), tmp_path / "out"
    files = {"tokenizer.model": b"\x0a\xff\xfe\r\n", "merges.txt": b"a b\r\nc d\n"}
    for name, content in files.items():
        (source / name).write_bytes(content)
    command("--hf-path", source, "--mlx-path", out)
    assert {name: (out / name).read_bytes() for name in files} == files


def test_a_source_without_a_head_is_reported(
    checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a source without a head, the output names the command that adds one."""
    command("--model", checkpoints(mtp=False), "--mlx-path", tmp_path / "out")
    said = capsys.readouterr().out
    assert "mtp-coord add-mtp" in said
    assert "M1" not in said


@pytest.mark.parametrize(
    "flag", [("--q-bits", "8"), ("--q-group-size", "32"), ("--q-mode", "mxfp4")]
)
def test_a_flag_without_effect_is_refused(
    checkpoints: Checkpoints, tmp_path: Path, flag: tuple[str, str]
) -> None:
    """A quantization flag without --quantize is an error. mlx-lm would ignore it."""
    with pytest.raises(UsageError, match=f"{flag[0]} needs --quantize"):
        command("--hf-path", checkpoints(), "--mlx-path", tmp_path / "out", *flag)


def test_progress_reaches_the_end(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The progress in bytes never decreases, and ends at the total."""
    told: list[tuple[int, int]] = []

    @contextmanager
    def bar(what: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: told.append((done, total))

    monkeypatch.setattr("coordinator.cli.convert_command.byte_bar", bar)
    command("--hf-path", checkpoints(), "--mlx-path", tmp_path / "out", "-q")
    assert told == sorted(told)
    assert len(told) > 20
    assert {total for _, total in told} == {told[-1][0]}
    written = Checkpoint.open(tmp_path / "out").tensors.values()
    assert told[-1][0] == sum(info.nbytes for info in written)


def test_an_unknown_source(tmp_path: Path) -> None:
    """An unknown source is an error, and nothing is written."""
    with pytest.raises(CheckpointError, match="no such directory"):
        command("--hf-path", tmp_path / "nothing", "--mlx-path", tmp_path / "out")
    assert not (tmp_path / "out").exists()
