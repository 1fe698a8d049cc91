"""The claim of a worker on the memory of its machine, and the worker that `serve --own-worker` finds there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.serve.options import ServeOptions
from coordinator.serve.own_worker import with_own_worker
from proto.errors import UsageError
from proto.span import Span
from proto.state_dir import claim_memory, running_worker

HOLDER = {"name": "mac-1", "address": "127.0.0.1:50606", "pid": 7, "owned": False}
OTHER = {"name": "mac-1-50607", "address": "127.0.0.1:50607", "pid": 8, "owned": False}

CLAIM = """
import sys
from pathlib import Path
from proto.state_dir import claim_memory
claim_memory(Path(sys.argv[1]), eval(sys.argv[2]), shared=eval(sys.argv[3]))
print("claimed", flush=True)
input()
"""


@contextmanager
def claimed(state: Path, *, shared: bool = False, **more: object) -> Iterator[None]:
    """Let another process claim the memory, as `HOLDER`, while the block runs."""
    command = [sys.executable, "-c", CLAIM, str(state), repr({**HOLDER, **more}), str(shared)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"claimed\n"
        yield
        process.communicate(b"\n", timeout=30)


def test_a_second_worker_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    """Not on another GPU, not with a limit for each, and not after the first has ended."""
    with claimed(tmp_path):
        for shared in (False, True):
            with pytest.raises(UsageError, match=r"mac-1 at 127.0.0.1:50606 \(process 7\) counts the memory"):
                claim_memory(tmp_path, OTHER, shared=shared)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1/2")
            claim_memory(tmp_path, OTHER, shared=False)
        assert running_worker(tmp_path) == HOLDER
    assert running_worker(tmp_path) == {}
    with claimed(tmp_path, shared=True):
        with pytest.raises(UsageError, match="start each with --memory-limit"):
            claim_memory(tmp_path, OTHER, shared=False)
        claim_memory(tmp_path, OTHER, shared=True)
    with pytest.raises(UsageError, match="mac-1-50607"):
        claim_memory(tmp_path, HOLDER, shared=False)


def test_the_worker_that_runs_here_is_the_own_worker(tmp_path: Path) -> None:
    """No second process starts. A worker of a coordinator that was killed ends, so it does not count."""
    options = ServeOptions(own_worker=True, state_dir=tmp_path)
    with claimed(tmp_path):
        found, own = with_own_worker(options)
        assert (found.worker, own) == ((HOLDER["address"],), None)
        with pytest.raises(UsageError, match=r"the worker mac-1 at 127\.0\.0\.1:50606 runs on this machine"):
            with_own_worker(ServeOptions(own_worker=True, state_dir=tmp_path, own_layers=Span(0, 4)))
        open_to_others = ServeOptions(own_worker=True, state_dir=tmp_path, listen=("192.0.2.1", 50504))
        assert with_own_worker(open_to_others)[0].worker == ("192.0.2.1:50606",)
    with claimed(tmp_path, address="127.0.0.1:0"):
        assert with_own_worker(options)[0].worker == ()
    with claimed(tmp_path, owned=True):
        _, own = with_own_worker(options)
        assert own is not None


def test_a_read_only_state_directory_stops_no_worker(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    claim_memory(file / "state", HOLDER, shared=False)
    assert running_worker(file / "state") == {}
    assert os.listdir(tmp_path) == ["file"]
