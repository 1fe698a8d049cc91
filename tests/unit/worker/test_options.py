"""The port that a worker uses again after a restart."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import pytest

from proto.errors import UsageError
from worker.node.options import remember_port, remembered_port

HOST = "127.0.0.1"


def free_port() -> int:
    """Return a free port below the range from which systems assign ports."""
    for port in random.sample(range(20_000, 32_000), 1000):
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port
    raise AssertionError("a thousand ports are taken")


def test_a_port_is_kept_by_name(tmp_path: Path) -> None:
    """Each worker of a state directory keeps its port over restarts; the directory is created."""
    folder = tmp_path / "new" / "state"
    assert remembered_port(folder, "a", HOST) == 0
    ports = [free_port(), free_port()]
    remember_port(folder, "a", 1)
    remember_port(folder, "b", ports[1])
    remember_port(folder, "a", ports[0])
    assert [remembered_port(folder, name, HOST) for name in ("a", "b", "c")] == [*ports, 0]


def test_a_port_that_is_taken_is_not_given(tmp_path: Path) -> None:
    """If the port is taken, another one is used until it is free again."""
    port = free_port()
    with socket.create_server((HOST, port)):
        remember_port(tmp_path, "a", port)
        assert remembered_port(tmp_path, "a", HOST) == 0
    assert remembered_port(tmp_path, "a", HOST) == port


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", '{"a": null}', '{"a": "x"}', '{"a": 99999}', '{"a": -1}', "\0"]
)
def test_a_file_that_says_nothing_is_no_port(tmp_path: Path, text: str) -> None:
    """With a damaged state file a worker starts on any port."""
    (tmp_path / "worker.json").write_text(text)
    assert remembered_port(tmp_path, "a", HOST) == 0


def test_a_file_that_is_damaged_is_written_anew(tmp_path: Path) -> None:
    """A state directory that cannot be written does not stop a worker."""
    port = free_port()
    for text in ("{", "[]"):
        (tmp_path / "worker.json").write_text(text)
        remember_port(tmp_path, "a", port)
        assert remembered_port(tmp_path, "a", HOST) == port


def test_connections_of_a_worker_that_was_killed_do_not_hold_its_port(tmp_path: Path) -> None:
    """A worker gets its port back while the system still holds connections of the old process."""
    port = free_port()
    with (
        socket.create_server((HOST, port)) as listener,
        socket.create_connection((HOST, port)) as client,
    ):
        listener.accept()[0].close()  # the side that closes first is the one that waits
        client.recv(1)
    remember_port(tmp_path, "a", port)
    assert remembered_port(tmp_path, "a", HOST) == port


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    """An unusable directory is an error that names the flag; without the flag nothing is read or written."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--state-dir"):
        remember_port(tmp_path / "file", "a", 5)
    remember_port(None, "a", 5)
    assert remembered_port(None, "a", HOST) == 0
