"""Connections of the HTTP server over real sockets: deadlines, bounds, and certificates that change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.serve import http_server
from coordinator.serve.certificate import TlsFiles, issue_certificate, renew_in_context
from coordinator.serve.http_server import HostCheck, HttpServer
from coordinator.trust.authority import Authority
from coordinator.trust.client_access import Invitation
from proto.rpc import listener as listeners
from proto.rpc.listener import bind_listener
from proto.trust.certificates import (
    Role,
    check_issued_by,
    from_pem,
    key_to_pem,
    renewal_time,
    utc_now,
)
from tests.support.api.api_client import ApiClient
from tests.support.processes.waits import until
from tests.support.trust.cluster_ca import make_authority, trust_of

PATIENCE = 30.0
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class App:
    """An app that answers with `parts` parts of 64 KB, and counts open requests."""

    def __init__(self, parts: int = 0) -> None:
        self.parts = parts
        self.open = 0
        self.hold = asyncio.Event()
        self.hold.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        self.open += 1
        watching = asyncio.create_task(self._disconnected(receive))
        answering = asyncio.create_task(self._answer(send))
        await asyncio.wait({watching, answering}, return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, answering):
            task.cancel()
        self.open -= 1

    async def _disconnected(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _answer(self, send: Send) -> None:
        await self.hold.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(self.parts):
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, folder: Path | None = None) -> AsyncIterator[int]:
    """Serve `app`, with TLS if there is a `folder` for its certificate, and yield the port."""

    async def nothing() -> None:
        """Do nothing."""

    server = HttpServer(app, nothing, lambda: None, lambda: 0)
    if folder is not None:
        trust = trust_of(make_authority(folder), Role.COORDINATOR)
        server.config.ssl_certfile = folder / "server.pem"
        server.config.ssl_keyfile = folder / "server.key"
        (folder / "server.pem").write_text(trust.certificate)
        (folder / "server.key").write_text(key_to_pem(trust.key))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    listener = bind_listener("test", "127.0.0.1", 0)
    await server.startup([listener])
    try:
        yield listener.getsockname()[1]
    finally:
        for each in server.servers:
            each.close()
        for acceptor in server._acceptors:
            await acceptor.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("sent", "tls"),
    [
        (b"", False),
        (REQUEST[:20], False),
        (b"\x16\x03\x01\x02\x00", False),
        (b"\x16\x03\x01\x02\x00\x01\x00", True),
    ],
    ids=["nothing", "half a head", "TLS without TLS", "half a handshake"],
)
async def test_a_connection_without_a_request_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sent: bytes, tls: bool
) -> None:
    """A client that sends nothing, or an incomplete head or handshake, loses its connection after a deadline."""
    monkeypatch.setattr(http_server, "HANDSHAKE_SECONDS" if tls else "HEAD_SECONDS", 0.2)
    async with listening(App(), tmp_path if tls else None) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()


async def test_a_slow_head_keeps_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a head that arrive one after the other do not extend its deadline."""
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)
    async with listening(App()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and time.monotonic() < began + PATIENCE:
                writer.write(b"G")
                await asyncio.sleep(0.05)
                await writer.drain()
        assert time.monotonic() < began + PATIENCE
        writer.close()


async def test_an_open_request_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that computes for longer than HEAD_SECONDS gets its answer."""
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.1)
    app = App()
    app.hold.clear()
    async with listening(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        await until(lambda: app.open == 1)
        await asyncio.sleep(0.3)
        app.hold.set()
        async with asyncio.timeout(PATIENCE):
            assert b"200 OK" in await reader.readline()
        writer.close()


async def test_a_client_that_does_not_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a client that stops reading ends after STALL_SECONDS, and one that reads slowly is complete."""
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 4 * PATIENCE)
    monkeypatch.setattr(http_server, "STALL_SECONDS", 1.5)
    app = App(parts=256)  # 16 MiB, more than the kernel buffers
    async with listening(app) as port:
        stalled, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
        writer.write(REQUEST)
        await until(lambda: app.open == 1)
        began = time.monotonic()
        await until(lambda: app.open == 0)
        assert time.monotonic() > began + 0.1
        stalled.feed_eof()
        writer.close()
        slow, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
        writer.write(REQUEST)
        received = 0
        async with asyncio.timeout(PATIENCE):
            while part := await slow.read(2**17):
                received += len(part)
                await asyncio.sleep(0.002)
                if part.endswith(b"end\r\n0\r\n\r\n"):
                    break
        assert received > 2**24
        writer.close()


async def test_requests_above_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of connections a new client gets status 503, and the open requests go on."""
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 4)
    app = App()
    app.hold.clear()
    async with listening(app) as port:
        busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in busy:
            writer.write(REQUEST)
        await until(lambda: app.open == 3)
        refused, last = await asyncio.open_connection("127.0.0.1", port)
        last.write(REQUEST)
        async with asyncio.timeout(PATIENCE):
            assert (await refused.read()).startswith(b"HTTP/1.1 503 ")
        assert app.open == 3
        for writer in (last, *(w for _, w in busy)):
            writer.close()


async def test_handshakes_of_strangers_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few connections without a handshake stay open, because each holds 256 KB, and a client gets its answer."""
    limit = 4
    monkeypatch.setattr(listeners, "MAX_WAITING", limit)
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    async with listening(App(), tmp_path) as port, asyncio.timeout(PATIENCE):
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10 * limit)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in opened]
        while len(still := [end for end in ends if not end.done()]) > limit:
            await asyncio.wait(still, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.1)
        assert sum(not end.done() for end in ends) == limit, "the others stay"
        client, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        writer.write(REQUEST)
        assert b"200 OK" in await client.readline()
        for each in (writer, *(w for _, w in opened)):
            each.close()
        await asyncio.gather(*ends, return_exceptions=True)


@pytest.mark.parametrize("tls", [False, True])
async def test_answers_are_sent_at_once(tls: bool, tmp_path: Path) -> None:
    """A connection of a bound listener has TCP_NODELAY. Without it a head and its body take 40 ms together."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    took = []
    async with listening(App(), tmp_path if tls else None) as port, asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting if tls else None)
        for _ in range(20):
            began = time.monotonic()
            writer.write(REQUEST)
            await reader.readuntil(b"end\r\n0\r\n\r\n")
            took.append(time.monotonic() - began)
        writer.close()
    assert sorted(took)[10] < 0.03


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("localhost:8080", True),
        ("mac-1.local:8080", True),
        ("chat.example", True),
        ("host.docker.internal:8080", True),
        ("Host.Containers.Internal.:8080", True),
        ("evil.example:8080", False),
        ("evil.internal:8080", False),
        ("host.docker.internal.evil.example", False),
        ("host.docker.internal:8080@evil.example", False),
    ],
)
async def test_the_names_of_this_server_are_known(host: str, known: bool) -> None:
    """Its addresses and names are served, those for containers too. The answer to others names --allowed-host."""
    app = HostCheck(PlainTextResponse("served"), "mac-1.lan", ("chat.example",))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.get("/", headers={"Host": host})
    if known:
        assert reply.text == "served"
    else:
        assert reply.status_code == 421
        assert host in reply.text
        assert "mtp-coord serve --allowed-host NAME" in reply.text


@pytest.fixture
def options(tmp_path: Path) -> Any:
    return SimpleNamespace(state=tmp_path, host="127.0.0.1")


def context_of(files: TlsFiles) -> ssl.SSLContext:
    """Return a server's context with the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    return context


async def served_certificate(context: ssl.SSLContext) -> str:
    """Return the certificate that a new connection gets."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        address = server.sockets[0].getsockname()
        return await asyncio.to_thread(ssl.get_server_certificate, address)


async def test_a_rotation_and_age_renew_the_certificate(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New connections get a certificate of the newest authority, and another one after two thirds of its life."""
    authority = make_authority(tmp_path)
    files = issue_certificate(authority, options)
    context = context_of(files)
    loaded = renew_in_context(options, files, context, 0)
    first = await served_certificate(context)
    assert renew_in_context(options, files, context, loaded) == loaded
    authority.rotate()
    loaded = renew_in_context(options, files, context, loaded)
    second = await served_certificate(context)
    assert second != first
    newest = Authority.open(tmp_path)
    assert newest is not None
    check_issued_by(from_pem(second)[0], newest.certificates[:1], utc_now())
    later = renewal_time(from_pem(second)[0])
    monkeypatch.setattr("proto.trust.certificates.utc_now", lambda: later)
    assert renew_in_context(options, files, context, loaded) != loaded
    assert await served_certificate(context) != second


async def test_a_changed_file_of_the_user_is_used(options: Any, tmp_path: Path) -> None:
    """The files of --tls-cert are read again when they change. Damaged ones are an error, and the old ones serve."""
    other = make_authority(tmp_path / "other")
    made = issue_certificate(other, options)
    files = TlsFiles(made.certificate, made.key)
    context = context_of(files)
    loaded = renew_in_context(options, files, context, 0)
    before = await served_certificate(context)
    issue_certificate(other, options)
    loaded = renew_in_context(options, files, context, loaded)
    after = await served_certificate(context)
    assert after != before
    files.certificate.write_text("damaged")
    with pytest.raises(ssl.SSLError):
        renew_in_context(options, files, context, loaded)
    assert await served_certificate(context) == after


INVITE = """
import http.client, json, sys
made = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
for line in sys.stdin:
    made.request("POST", "/v1/cluster/invitations", "{}", {"Content-Type": "application/json", **json.loads(line)})
    answer = made.getresponse()
    answer.read()
    print(answer.status, flush=True)
"""


async def test_an_invitation_goes_to_this_user_alone() -> None:
    """Another process of this user gets one. No header makes a client one, and a proxy does not vouch for others."""
    api = ApiClient()
    object.__setattr__(api.app.state.api, "invite", lambda: Invitation("mtp-worker --join mtp1.abc", 7))
    async with listening(api.app) as port:
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        own = await asyncio.create_subprocess_exec(sys.executable, "-c", INVITE, str(port), **pipes)  # type: ignore[arg-type]
        assert own.stdin is not None
        assert own.stdout is not None
        answers = []
        for headers in ({}, {"X-Forwarded-For": "10.0.0.7"}, {"Via": "1.1 proxy"}):
            own.stdin.write(json.dumps(headers).encode() + b"\n")
            answers.append((await own.stdout.readline()).decode().strip())
        assert answers == ["200", "403", "403"]
        ends = [c.laddr for c in psutil.Process(own.pid).net_connections("tcp") if c.raddr]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as other_user:
            for forged in ({}, {"X-Forwarded-For": f"127.0.0.1:{ends[0].port}"}):
                reply = await other_user.post("/v1/cluster/invitations", json={}, headers=forged)
                assert reply.status_code == 403, forged
        own.stdin.close()
        await own.wait()
