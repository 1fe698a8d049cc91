"""Joins, trust and removal with real processes at a network address of this machine, and between two machines."""

from __future__ import annotations

import asyncio
import base64
import calendar
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.cli.cluster_commands import fetch, parse
from coordinator.trust.cluster_trust import ClusterTrust
from coordinator.trust.keys import OWNER_KEY, Scope
from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.frame import VERSION
from proto.rpc.channels import open_channel
from proto.state_dir import STATE_DIR
from proto.trust.certificates import Role
from proto.trust.joining import JoinToken, new_token
from tests.support.processes.own_address import network_address
from tests.support.processes.processes import (
    Process,
    as_coordinator,
    ending,
    launch_coordinator,
    launch_worker,
)
from tests.support.processes.reserved_port import reserved_port
from tests.support.trust.cluster_ca import make_authority, trust_of

PROMPT = "a secret prompt that nobody else may read"
WRONG_KEY = "mtp-a-key-that-nobody-created"
DEADLINE = 60.0
EXECUTED = ("env",)
"""Prefix of a process that is not forked, so that its command line is its own."""


@pytest.fixture
def host() -> str:
    """Return an IPv4 address of this machine that is not loopback."""
    return network_address()


def command(state: Path, *words: str, **env: str) -> str:
    """Run an `mtp-coord` command and return its output."""
    code = "from coordinator.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--state-dir", str(state)],
        check=True,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    return done.stdout.strip()


def join_address(coordinator: Process) -> str:
    """Return the address where machines join, from the log."""
    return str(coordinator.wait_for("machines join here")["address"])


def completion(url: str, key: str = "", context: ssl.SSLContext | None = None) -> dict[str, Any]:
    """Ask for a completion of PROMPT and return the answer."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    body = json.dumps({"model": "builtin", "prompt": PROMPT, "max_tokens": 6}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=DEADLINE, context=context) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


@contextmanager
def joined_cluster(host: str, folder: Path) -> Iterator[tuple[Any, list[Process], str]]:
    """Run a coordinator with a local worker and a worker that joined by a token. Yield them and the token."""
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port(host)) for _ in range(2)]
        named = [word for port in ports for word in ("--worker", f"{host}:{port}")]
        state = ("--state-dir", str(folder / "a"))
        listen = ("--listen", f"{host}:0", *state)
        process = launch_coordinator(folder, *listen, "--nodes", "2", "--wait", "60", *named, prefix=EXECUTED)
        stack.enter_context(ending(process))
        join_address(process)
        token = command(folder / "a", "token", "create", "--bare")
        local = launch_worker(folder, "mac-1", "--listen", f"{host}:{ports[0]}", *state)
        stack.enter_context(ending(local))
        other = joining_worker(folder, "mac-2", f"{host}:{ports[1]}", folder / "b", token)
        with ending(other):
            yield as_coordinator(process), [local, other], token


def joining_worker(folder: Path, name: str, listen: str, state: Path, token: str) -> Process:
    """Launch a worker with a token in its environment."""
    flags = ("--listen", listen, "--state-dir", str(state))
    return launch_worker(folder, name, *flags, env={"MTP_JOIN_TOKEN": token}, prefix=EXECUTED)


def test_machines_join_by_token(host: str, tmp_path: Path) -> None:
    """Two workers join and serve over mutual TLS. The token works once, and no secret reaches any output."""
    state = tmp_path / "a"
    with joined_cluster(host, tmp_path) as (coordinator, workers, token):
        assert completion(coordinator.url)["choices"][0]["text"]
        assert len(coordinator.records("machine joined")) == 2
        again = joining_worker(tmp_path, "late", f"{host}:0", tmp_path / "c", token)
        with ending(again):
            assert again.wait(DEADLINE) == 1
        assert "mtp-coord token create" in again.text()
        assert coordinator.records("join refused")[0]["reason"] == "it is used"
        scopes = [word for scope in Scope for word in ("--scope", scope)]
        key = command(state, "key", "create", "all", *scopes)
        processes = [coordinator, *workers]
        outputs = [_answers(coordinator.url, key), asyncio.run(_state_reports(state, workers))]
        outputs += [psutil.Process(p.popen.pid).cmdline().__repr__() for p in processes]
    outputs += [p.text() for p in (*processes, again)]
    keys = [f.read_text() for f in tmp_path.rglob("*.key")]
    bodies = [line for pem in keys for line in pem.splitlines() if "-----" not in line]
    assert bodies
    assert not list((state / "authority").glob("local.token")), "it ends with the coordinator"
    secret = JoinToken.parse(token).secret
    encoded = [base64.urlsafe_b64encode(secret).decode()[:-3], secret.hex(), repr(secret)[2:-1]]
    for text in (token, *encoded, key, WRONG_KEY, PROMPT, *bodies):
        for output in outputs:
            assert text not in output
    assert (tmp_path / "b" / "worker" / "node.key").stat().st_mode & 0o777 == 0o600


def test_a_worker_that_starts_first_joins_the_cluster_of_its_machine(tmp_path: Path) -> None:
    """A worker on loopback without a token waits without TLS, and has it when the coordinator starts.

    The local token of a coordinator that has ended joins nothing, and the worker says what to do.
    """
    state = ("--state-dir", str(tmp_path / "a"))
    first = launch_worker(tmp_path, "first", *state)
    with ending(first):
        address = str(first.wait_for("worker ready")["address"])
        listen = ("--listen", "127.0.0.1:0", *state)
        serve = launch_coordinator(tmp_path, "--worker", address, "--nodes", "1", *listen)
        with ending(serve):
            assert completion(str(serve.wait_for("serving")["url"]).removesuffix("/v1"))["choices"]
            ready = first.records("worker ready")
            without_worker = shutil.ignore_patterns("worker")
            shutil.copytree(tmp_path / "a", tmp_path / "stale", ignore=without_worker)
        assert [str(r["address"]) for r in ready] == [address] * 2
        assert first.records("joined")
        assert serve.records("machine joined")
    alone = launch_worker(tmp_path, "late", "--state-dir", str(tmp_path / "stale"))
    with ending(alone):
        alone.wait_for("worker ready")
        assert alone.records("not joined, so without TLS on loopback"), "the token has no coordinator"
        advice = "no coordinator yet. Start one with: mtp-coord serve --model MODEL --worker 127."
        due = time.monotonic() + DEADLINE
        while advice not in alone.text() and time.monotonic() < due:
            time.sleep(0.1)
        assert advice in alone.text()
        assert "restart this worker with --join TOKEN, from mtp-coord token create" in alone.text()


def _answers(url: str, key: str) -> str:
    """Return everything that the HTTP server says about itself, and its answers to wrong requests."""
    bearer, wrong = {"Authorization": f"Bearer {key}"}, {"Authorization": f"Bearer {WRONG_KEY}"}
    refused = {"temperature": -1}
    body = json.dumps({"model": "builtin", "prompt": PROMPT, **refused, "options": refused}).encode()
    requests: list[tuple[str, bytes | None, dict[str, str], int]] = [
        ("/status", None, bearer, 200),
        ("/metrics", None, bearer, 200),
        ("/trace?seconds=60", None, bearer, 200),
        ("/v1/models", None, bearer, 200),
        ("/v1/models", None, wrong, 401),
        ("/v1/no/such/path", None, bearer, 404),
        ("/v1/completions", body, bearer, 400),
        ("/v1/completions", body[:-1], bearer, 400),
        ("/v1/completions", body, wrong, 401),
        ("/v1/messages", body, {"x-api-key": WRONG_KEY}, 401),
        ("/api/generate", body, bearer, 400),
    ]
    found = []
    for path, content, headers, status in requests:
        request = urllib.request.Request(url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE) as reply:
                answer, text, sent = reply.status, reply.read(), reply.headers
        except urllib.error.HTTPError as error:
            answer, text, sent = error.code, error.read(), error.headers
        assert answer == status, (path, text)
        found.append(f"{sent}{text.decode()}")
    return "".join(found)


async def _state_reports(state: Path, workers: list[Process]) -> str:
    """Return the descriptions, state reports and traces of the workers, as a coordinator receives them."""
    trust = ClusterTrust.open(state, create=False)
    assert trust is not None
    found = []
    for worker in workers:
        address = str(worker.wait_for("worker ready")["address"])
        async with open_channel(address, trust.trust) as channel:
            stub = pb_grpc.WorkerStub(channel)
            found.append(str(await stub.Describe(pb.DescribeRequest(protocol_version=VERSION))))
            found.append(str(await stub.ReportTrace(pb.TraceRequest())))
            found.append(str(await stub.ReportState(pb.StateReportRequest())))
    return "".join(found)


def test_a_removed_machine_is_refused_within_a_second(host: str, tmp_path: Path) -> None:
    """`node remove` disconnects the machine, the plan goes on without it, and it cannot come back."""
    with joined_cluster(host, tmp_path) as (coordinator, workers, _):
        assert "mac-2" in command(tmp_path / "a", "node", "list")
        command(tmp_path / "a", "node", "remove", "mac-2")
        removed_at = time.time()
        lost = coordinator.wait_for("worker lost")
        assert lost["error"] == "was removed from the cluster"
        stamp = time.strptime(lost["time"][:19], "%Y-%m-%dT%H:%M:%S")
        assert calendar.timegm(stamp) - removed_at < 1.0
        coordinator.wait_for("serving", count=1)
        assert completion(coordinator.url)["choices"][0]["text"]
        refused = coordinator.wait_for("no worker")
        while "removed" not in refused["error"]:
            refused = coordinator.records("no worker")[-1]
            assert time.time() < removed_at + DEADLINE
            time.sleep(0.1)
        assert "removed" in command(tmp_path / "a", "node", "list")
        assert workers[1].running


def test_a_worker_tells_a_false_server_nothing(tmp_path: Path) -> None:
    """A server without the authority of the token gets a TLS handshake and not one byte of the join."""
    mine, false = make_authority(tmp_path / "a"), make_authority(tmp_path / "b")
    impostor = trust_of(false, Role.COORDINATOR)
    pem = tmp_path / "impostor.pem"
    pem.write_text(impostor.key_pem + impostor.certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    received: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        """Accept one join, offer the other authority, and record what comes."""
        plain, _ = listener.accept()
        with plain, context.wrap_socket(plain, server_side=True) as secured:
            secured.sendall(json.dumps({"authorities": mine.bundle + false.bundle}).encode() + b"\n")
            received.append(secured.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        token = new_token(mine.cluster, mine.fingerprint, address)
        worker = joining_worker(tmp_path, "w", "0.0.0.0:0", tmp_path / "w", str(token))
        with ending(worker):
            assert worker.wait(DEADLINE) == 1
        server.join(DEADLINE)
    assert received == [b""]
    assert "is not the coordinator of the token" in worker.text()


def test_http_off_loopback(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP on a network has TLS and needs a key. Keys work at once, by scope, and names are checked.

    The owner of the state directory asks for the status without a key, as long as the server runs.
    """
    state = tmp_path / "a"
    monkeypatch.setenv(STATE_DIR, str(state))
    key = command(state, "key", "create", "laptop")
    process = launch_coordinator(tmp_path, "--host", host, "--single-node", "--state-dir", str(state))
    with ending(process):
        coordinator = as_coordinator(process)
        assert coordinator.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(state / "authority" / "authorities.pem"))
        assert completion(coordinator.url, key, context)["choices"][0]["text"]
        reader = command(state, "key", "create", "grafana", "--scope", "metrics")
        expected: list[tuple[str, str, dict[str, str], int]] = [
            ("/status", "", {}, 401),
            ("/status", key, {}, 403),
            ("/status", reader, {}, 200),
            ("/v1/models", reader, {}, 403),
            ("/v1/models", key, {}, 200),
            ("/health", "", {"Host": "evil.example"}, 421),
        ]
        for path, text, headers, status in expected:
            assert _status(coordinator.url + path, text, headers, context) == status, path
        command(state, "key", "revoke", "laptop")
        command(state, "key", "revoke", "grafana")
        for text in (key, reader, ""):
            assert _status(coordinator.url + "/v1/models", text, {}, context) == 401
        with pytest.raises((urllib.error.URLError, OSError)):
            urllib.request.urlopen(coordinator.url.replace("https", "http"), timeout=5)
        assert parse(fetch(coordinator.url, None)).ready
        owner_key = json.loads((state / OWNER_KEY).read_text())["key"]
    assert key not in process.text()
    assert owner_key not in process.text()


def _status(url: str, key: str, headers: dict[str, str], context: ssl.SSLContext) -> int:
    sent = headers | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        request = urllib.request.Request(url, headers=sent)
        with urllib.request.urlopen(request, timeout=DEADLINE, context=context) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
