"""The folder of a worker's socket: removed at its end, and by the next worker after a kill."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from worker.node.process import remove_stale_folders, socket_folder

HOLD = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from worker.node.process import socket_folder
with socket_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_only_folders_without_a_process_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder stays while its worker runs. Once the worker is killed, the next one removes it, and no other folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreign = tmp_path / "mtp-foreign"
    foreign.mkdir()
    (foreign / "grpc").touch()
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        remove_stale_folders(tmp_path)
        assert folder.is_dir()
        process.kill()
        process.wait()
        assert folder.is_dir()
    with socket_folder() as own:
        assert {*tmp_path.iterdir()} == {foreign, Path(own)}
        remove_stale_folders(tmp_path)
        assert Path(own).is_dir()
    assert [*tmp_path.iterdir()] == [foreign]
