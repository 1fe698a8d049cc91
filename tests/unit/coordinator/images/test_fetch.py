"""Images from other servers: only public addresses, few bytes, few redirects, and a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from coordinator.images import fetch
from coordinator.images.fetch import fetch_image
from proto.errors import RequestError

Reply = Callable[[int], bytes]


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[str]:
    """Serve `reply(number)` for the request with that number, and yield the URL."""
    number = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply(number))
        number += 1
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a.png"


def body(content: bytes, status: str = "200 OK", head: str = "") -> bytes:
    """Return an HTTP reply."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n{head}\r\n".encode() + content


def moved(place: str) -> bytes:
    """Return a redirect to `place`."""
    return body(b"", "302 Found", f"Location: {place}\r\n")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x",
        "http://[::1]/x",
        "http://10.0.0.1/x",
        "http://169.254.169.254/x",
        "http://[::ffff:127.0.0.1]/x",
        "http://[64:ff9b::a9fe:a9fe]/x",
        "http://[2002:7f00:1::]/x",
        "http://[ff02::1]/x",
        "http://localhost/x",
        "http:///x",
    ],
)
async def test_no_address_of_this_network_is_asked(url: str) -> None:
    """Loopback, private and link-local addresses are refused before a connection."""
    with pytest.raises(RequestError, match=r"public Internet|not an http address") as refused:
        await fetch_image(url, "messages")
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (lambda _: moved("/again"), "more than 3 redirects"),
        (lambda _: moved("http://10.0.0.1/x"), "10.0.0.1 is no address of the public Internet"),
        (lambda _: body(b"", "404 Not Found"), "404"),
        (lambda _: body(b"x" * 2000), "more than 1000 bytes"),
        (lambda _: body(b"x", head="Content-Encoding: gzip\r\n"), "compressed"),
        (lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "."),
    ],
    ids=[
        "redirects",
        "a redirect into this network",
        "an error",
        "too long",
        "compressed",
        "cut off",
    ],
)
async def test_a_bad_answer_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, reply: Reply, problem: str
) -> None:
    """The error says what happened. A public server cannot send the request on to this network."""
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")
    monkeypatch.setattr(fetch, "MAX_FETCHED_BYTES", 1000)
    async with serving(reply) as url:
        with pytest.raises(RequestError, match=f"cannot be loaded: .*{problem}"):
            await fetch_image(url, "messages")


async def test_a_public_image_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirects of one server are followed."""
    monkeypatch.setattr(fetch, "is_public", lambda _: True)
    async with serving(lambda n: body(b"bytes") if n else moved("/b.png")) as url:
        assert await fetch_image(url, "messages") == b"bytes"
