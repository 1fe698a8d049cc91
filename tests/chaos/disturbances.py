"""Clients that disturb others, each as a function that runs until it is cancelled and counts what it received."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

BODY_BYTES = 16 * 2**20 - 1024
"""Bytes. Just below the largest body that the server accepts."""

FLOOD_CLIENTS, IDLE_CONNECTIONS, STALLED_READERS, LARGE_SENDERS, LONG_PROMPTS = 400, 2000, 4, 4, 16
LONG_PROMPT_TOKENS = 20_000
RETRY_SECONDS = 0.5
"""Seconds before a refused client of the flood tries again. It ignores Retry-After."""

BUFFER_BYTES = 4096
"""Bytes. Receive buffer of a client that stops reading."""


ESTABLISHED = 1
"""The state of an open connection in Linux's TCP_INFO."""


@dataclass
class Received:
    """The statuses and ends that disturbing clients saw, and the longest time of a large body in seconds."""

    counts: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0


@dataclass
class Server:
    """The address of the disturbed server, the name of its model, and the API key of its disturbing clients."""

    url: str
    model: str
    key: str = ""

    def head(self, path: str, length: int) -> bytes:
        """Return the head of a request."""
        lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
        lines += [f"Authorization: Bearer {self.key}"] * bool(self.key)
        return "\r\n".join(
            (*lines, f"Content-Length: {length}", "Connection: close", "", "")
        ).encode()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    async def open(
        self, buffer: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new connection, whose kernel buffer has `buffer` bytes."""
        raw = socket.socket()
        raw.setblocking(False)
        if buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        try:
            await asyncio.get_running_loop().sock_connect(raw, self.address)
        except BaseException:
            raw.close()
            raise
        return await asyncio.open_connection(sock=raw, limit=2**16)

    async def post(self, path: str, body: bytes) -> tuple[int, dict[str, str]]:
        """Send a body over a connection of its own; return status and headers once the answer is complete."""
        reader, writer = await self.open()
        try:
            with contextlib.suppress(ConnectionError):  # refused before the body was complete
                writer.write(self.head(path, len(body)) + body)
                await writer.drain()
            first = (await reader.readline()).split()
            headers = {}
            while line := (await reader.readline()).strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            while await reader.read(65536):
                pass
            return int(first[1]) if len(first) > 1 else 0, headers
        finally:
            writer.close()


def completion(server: Server, prompt: object, tokens: int, **more: object) -> bytes:
    """Return the body of a request for a completion."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return json.dumps({**body, **more}).encode()


async def flood(server: Server, received: Received) -> None:
    """Send requests from many clients at once, far beyond the queue."""

    async def send() -> None:
        """Send one request after the other."""
        while True:
            body = completion(server, f"class A{random.random()}:", 64)
            status, headers = await server.post("/v1/completions", body)
            advice = " with Retry-After" if "retry-after" in headers else ""
            received.counts[f"{status}{advice}"] += 1
            if status != 200:
                await asyncio.sleep(RETRY_SECONDS)

    await _run(FLOOD_CLIENTS, send, received)


async def idle(server: Server, received: Received, first: bytes = b"") -> None:
    """Hold many connections that send `first` and nothing else. One that the server ends is opened again."""

    async def hold() -> None:
        """Hold a connection."""
        while True:
            reader, writer = await server.open()
            received.counts["opened"] += 1
            try:
                writer.write(first)
                began = time.monotonic()
                answer = await reader.read(1024)
                received.counts[_status(answer)] += 1
                received.longest = max(received.longest, time.monotonic() - began)
                while answer:
                    answer = await reader.read(1024)
            finally:
                writer.close()
            await asyncio.sleep(RETRY_SECONDS)

    await _run(IDLE_CONNECTIONS, hold, received)


async def half_heads(server: Server, received: Received) -> None:
    """Hold many connections with half of a request's head."""
    await idle(server, received, b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ")


async def half_bodies(server: Server, received: Received) -> None:
    """Hold many connections with a small part of a body."""
    await idle(server, received, server.head("/v1/completions", 10_000) + b'{"model": ')


async def half_handshakes(server: Server, received: Received) -> None:
    """Hold many connections with the first bytes of a TLS handshake. They are noise to a server without TLS."""
    await idle(server, received, b"\x16\x03\x01\x02\x00\x01\x00")


async def readers(server: Server, received: Received) -> None:
    """Request the same streams as `slow_readers`, and read them."""

    async def read() -> None:
        """Read one stream after the other."""
        while True:
            body = completion(server, "def f(", 8000, stream=True, logprobs=20)
            status, _ = await server.post("/v1/completions", body)
            received.counts[str(status)] += 1

    await _run(STALLED_READERS, read, received)


async def slow_readers(server: Server, received: Received) -> None:
    """Request long streams with log-probabilities, and never read them."""

    async def stall() -> None:
        """Request a stream, and wait until the server ends the connection."""
        while True:
            reader, writer = await server.open(BUFFER_BYTES)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            try:
                body = completion(server, "def f(", 8000, stream=True, logprobs=20)
                writer.write(server.head("/v1/completions", len(body)) + body)
                received.counts["opened"] += 1
                began = time.monotonic()
                await _wait_for_end(writer)
                received.counts["ended by the server"] += 1
                received.longest = max(received.longest, time.monotonic() - began)
            finally:
                writer.close()

    await _run(STALLED_READERS, stall, received)


def large_body(kind: str, server: Server) -> tuple[str, bytes]:
    """Return the path and a body of about BODY_BYTES."""
    chat, text = "/v1/chat/completions", "/v1/completions"
    match kind:
        case "one string":
            return text, b'{"prompt": "' + b"word " * (BODY_BYTES // 5) + b'"}'
        case "messages":
            return chat, _repeat(b'{"role": "user", "content": "a"}', b'{"messages": [', b"]}")
        case "wrong messages":
            return chat, _repeat(b"1", b'{"messages": [', b"]}")
        case "tokens":
            return text, _repeat(b"5", b'{"prompt": [', b"]}")
        case "unknown fields":
            fields = b",".join(b'"a%d": 1' % number for number in range(1_000_000))
            return text, b'{"prompt": "a",' + fields + b"}"
        case "metadata":
            return text, _repeat(
                b"[[[[[[[[[[]]]]]]]]]]", b'{"prompt": "a", "metadata": {"a": [', b"]}}"
            )
    return text, b'{"prompt": ' + b"[" * (BODY_BYTES // 2) + b"]" * (BODY_BYTES // 2) + b"}"


BODIES = (
    "one string",
    "messages",
    "wrong messages",
    "tokens",
    "unknown fields",
    "metadata",
    "nesting",
)
"""The kinds of large bodies."""


async def large_bodies(kind: str, server: Server, received: Received) -> None:
    """Send bodies of one kind from several clients at once."""
    path, body = large_body(kind, server)

    async def send() -> None:
        """Send the body again and again."""
        while True:
            began = time.monotonic()
            status, _ = await server.post(path, body)
            received.counts[str(status)] += 1
            received.longest = max(received.longest, time.monotonic() - began)

    await _run(LARGE_SENDERS, send, received)


async def long_prompts(server: Server, received: Received) -> None:
    """Send prompts of LONG_PROMPT_TOKENS from several clients at once."""

    async def send() -> None:
        """Send one prompt after the other."""
        while True:
            tokens = [random.randrange(3, 3000) for _ in range(LONG_PROMPT_TOKENS)]
            status, _ = await server.post("/v1/completions", completion(server, tokens, 16))
            received.counts[str(status)] += 1

    await _run(LONG_PROMPTS, send, received)


def _repeat(unit: bytes, before: bytes, after: bytes) -> bytes:
    return before + b",".join([unit] * (BODY_BYTES // (len(unit) + 1))) + after


def _status(answer: bytes) -> str:
    return answer.split()[1].decode() if answer.startswith(b"HTTP/") else "closed"


async def _wait_for_end(writer: asyncio.StreamWriter) -> None:
    """Wait until the server ends the connection of a client that does not read."""
    raw, state = writer.get_extra_info("socket"), ESTABLISHED
    while state == ESTABLISHED:
        await asyncio.sleep(0.5)
        state = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


async def _run(count: int, client: Callable[[], Awaitable[None]], received: Received) -> None:
    """Run `count` clients until this task is cancelled. A connection that fails is counted and opened again."""

    async def repeat() -> None:
        """Run a client again after its connection failed."""
        while True:
            try:
                await client()
            except (OSError, ssl.SSLError, asyncio.IncompleteReadError) as error:
                received.counts[type(error).__name__] += 1
                await asyncio.sleep(RETRY_SECONDS)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(repeat())
