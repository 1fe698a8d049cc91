"""`mtp-coord status` against a server, another program, and no server."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner, Result

from coordinator.cli import app as commands
from coordinator.cli import cluster_commands as command
from coordinator.status.cluster_status import ClusterStatus, NodeStatus
from coordinator.trust.keys import KeyRing, Scope
from coordinator.web.context import ApiOptions
from proto.errors import AccessError, NotReadyError, UsageError
from proto.state_dir import STATE_DIR
from tests.support.api.api_client import ApiClient
from tests.support.api.api_server import serving

KEY = "secret-key"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(ApiClient(options=ApiOptions(api_keys=(KEY,))).app) as url:
        yield url


def run(*arguments: str, key: str = "") -> Result:
    """Run a command on a terminal of 120 characters, with a key in its environment."""
    return CliRunner(env={"COLUMNS": "120", "MTP_API_KEY": key}).invoke(commands, arguments)


@contextmanager
def another_program(host: str, port: int, answer: bytes = b"") -> Iterator[tuple[str, list[bytes]]]:
    """Run a server that answers one connection. Yield its URL, and what it receives until the end of the block."""
    received: list[bytes] = []
    with socket.create_server((host, port)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            received.append(connection.recv(65536))
            connection.sendall(answer)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://{host}:{listener.getsockname()[1]}", received
        thread.join(10)


def test_once_shows_the_cluster(url: str) -> None:
    """The output has nodes with layers, memory, health and times, requests, and acceptance by position."""
    done = run("status", "--url", url, "--api-key", KEY)
    assert done.exit_code == 0, done.output
    for part in (
        *(
            "serving for 90 s",
            "plan 3",
            "tiny",
            "2 running",
            "1 of 64 waiting",
            "41.5",
            "67% of the head's drafts accepted (80, 50 by position)",
        ),
        *("mac-1", "0-3", "ready", "1.07 GB of 2.15 GB", "12.5", "10.0.0.1:7000", "loading 50%"),
        *("it holds another checkpoint", "up for 2 min", "1 recovery"),
    ):
        assert part in done.output


def test_an_idle_worker_comes_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle workers without a reason are named, and only while a plan serves."""
    nodes = (
        NodeStatus("spare", "10.0.0.3:7000"),
        NodeStatus("flapping", "10.0.0.4:7000", detail="not used for 9 s, after 3 failures"),
        NodeStatus("busy", "10.0.0.5:7000", "0-3", health="ready"),
    )
    ready = True
    monkeypatch.setattr(
        command,
        "fetch",
        lambda url, key: TypeAdapter(ClusterStatus).dump_json(ClusterStatus(ready, "m", nodes=nodes)),
    )
    advice = [line for line in run("status").output.splitlines() if "no answer is open" in line]
    ready = False
    assert "no answer is open" not in run("status").output
    assert len(advice) == 1
    assert "spare" in advice[0]
    assert "flapping" not in advice[0]
    assert "busy" not in advice[0]


def test_json_is_the_servers_own_object(url: str) -> None:
    """Scripts read the answer of the server unchanged."""
    done = run("status", "--url", url, "--api-key", KEY, "--json")
    assert json.loads(done.output)["epoch"] == 3


def test_mistakes_are_explained(url: str) -> None:
    """A missing key, a missing server, another server and a malformed URL are errors with advice."""
    with pytest.raises(AccessError, match="--api-key"):
        command.fetch(url, None)
    with pytest.raises(UsageError, match="path not found"):
        command.fetch(f"{url}/elsewhere", KEY)
    with socket.socket() as taken:  # no process listens on this port
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(NotReadyError, match="Start mtp-coord serve"):
            command.fetch(f"http://127.0.0.1:{port}", None)
    for wrong in ("ftp://x", "http://", "http://x:port", "http://x[/b]"):
        with pytest.raises(UsageError, match="--url"):
            command.fetch(wrong, None)


@pytest.fixture
def owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[KeyRing, str]]:
    """Yield the keys and the URL of a server whose state directory is this user's."""
    ring = KeyRing(tmp_path)
    monkeypatch.setenv(STATE_DIR, str(tmp_path))
    with serving(ApiClient(options=ApiOptions(key_ring=ring)).app) as url:
        ring.admit_owner(url)
        yield ring, url


def test_the_owner_of_the_server_needs_no_key(owned: tuple[KeyRing, str]) -> None:
    """After `key create`, the owner's commands go on without a key, and other users need one with the scope."""
    ring, url = owned
    key = ring.create("laptop", frozenset({Scope.INFERENCE}))
    for own in (url, url.replace("127.0.0.1", "localhost"), f"{url}/v1"):
        assert run("status", "--url", own).exit_code == 0
    with pytest.raises(UsageError, match="needs the scope metrics"):
        command.fetch(url, key)
    os.environ[STATE_DIR] += "/of-another-user"
    with pytest.raises(AccessError, match=STATE_DIR):
        command.fetch(url, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_no_other_program_gets_the_owners_key(owned: tuple[KeyRing, str], host: str) -> None:
    """A program at another port or address, as of another user of this machine, receives no key."""
    _, url = owned
    port = 0 if host == "127.0.0.1" else int(url.rpartition(":")[2])
    with another_program(host, port) as (theirs, received), pytest.raises(NotReadyError):
        command.fetch(theirs, None)
    assert b"GET /status" in received[0]
    assert b"uthorization" not in received[0]


def test_another_program_does_not_reach_the_terminal() -> None:
    """The bytes of a program that does not speak HTTP are not printed."""
    ssh = b"SSH-2.0-OpenSSH \x1b[31mred\r\n"
    with (
        another_program("127.0.0.1", 0, ssh) as (theirs, _),
        pytest.raises(NotReadyError, match="no coordinator answers") as raised,
    ):
        command.fetch(theirs, None)
    assert "SSH" not in str(raised.value)
