"""Idle connections of a stranger at the port of a worker that joins a cluster which serves."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.support.processes.processes import (
    as_coordinator,
    ending,
    launch_coordinator,
    launch_worker,
    running_workers,
)
from tests.support.processes.reserved_port import reserved_port

CONNECTIONS = 300
"""More connections than a worker's port admits."""

DEADLINE = 60.0


@contextmanager
def saturated(address: str) -> Iterator[None]:
    """Hold the port at `address` with idle connections of one byte, and open closed ones again."""
    host, _, port = address.rpartition(":")
    ended = threading.Event()
    held: list[socket.socket] = []

    def hold() -> None:
        while not ended.is_set():
            for one in [one for one in held if _is_closed(one)]:
                held.remove(one)
                one.close()
            while len(held) < CONNECTIONS and not ended.is_set():
                with contextlib.suppress(OSError):
                    one = socket.create_connection((host, int(port)), 2)
                    held.append(one)
                    one.send(b"M")
                    one.setblocking(False)
            ended.wait(0.05)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(DEADLINE)
        for one in held:
            one.close()


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_idle_connections_keep_no_member_out(tmp_path: Path) -> None:
    """A worker whose port a stranger fills joins a cluster that serves, and the plan with it serves."""
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port("127.0.0.1"))
        (first,) = stack.enter_context(running_workers(tmp_path, "builtin", 1))
        late = f"127.0.0.1:{port}"
        named = ("--worker", first.address, "--worker", late, "--nodes", "1")
        process = launch_coordinator(tmp_path, "--model", "builtin", *named)
        stack.enter_context(ending(process))
        coordinator = as_coordinator(process)
        other = launch_worker(tmp_path, "late", "--model", "builtin", "--listen", late)
        stack.enter_context(ending(other))
        other.wait_for("worker ready")
        stack.enter_context(saturated(late))
        coordinator.wait_for("cluster: serving", count=2)
        body = {"prompt": "x = ", "max_tokens": 4}
        reply = httpx.post(f"{coordinator.url}/v1/completions", json=body, timeout=DEADLINE)
        assert reply.status_code == 200
        nodes = httpx.get(f"{coordinator.url}/status", timeout=DEADLINE).json()["nodes"]
        assert [bool(node["span"]) for node in nodes] == [True, True]
