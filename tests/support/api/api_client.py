"""A client of the API over ASGI, without sockets, for whole answers and streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from coordinator.answers.journal import Journal
from coordinator.images.encoder import ImageEncoder
from coordinator.serve.app import create_app
from coordinator.text.embedder import Embedder
from coordinator.text.tokenizer import ModelInfo, Tokenizer
from coordinator.web.context import Api, ApiOptions
from proto.params import SamplingParams
from tests.support.api.fake_generator import FakeGenerator, FakeStatus
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer
from tests.support.processes.waits import PATIENCE as PATIENCE

USER = {"role": "user", "content": "Hi"}

CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
"""The text of a call in the form of Qwen3.5."""


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 100},
    "/api/chat": {"model": "tiny", "messages": [USER], "stream": False},
    "/api/generate": {"model": "tiny", "prompt": "Hi", "stream": False},
}
"""A short request of each dialect, by path."""


@cache
def tiny_tokenizer() -> Tokenizer:
    """Return the tokenizer that all tests share."""
    with TemporaryDirectory() as folder:
        return Tokenizer.load(write_tokenizer(Path(folder)))


@dataclass
class Events:
    """The content of a stream: its data as JSON objects, its comments, and whether [DONE] ended it."""

    status: int
    data: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    done: bool = False

    @classmethod
    def read(cls, status: int, text: str) -> Events:
        """Parse the text of a stream without named events."""
        events = cls(status)
        for block in text.split("\n\n"):
            if block.startswith(": "):
                events.comments.append(block[2:])
            elif block == "data: [DONE]":
                events.done = True
            elif block:
                assert block.startswith("data: ")
                assert "\n" not in block
                assert not events.done
                events.data.append(json.loads(block.removeprefix("data: ")))
        return events

    def deltas(self, key: str, index: int = 0) -> list[Any]:
        """Return the non-empty values of `key` in the deltas of a chat's choice."""
        entries = [entry for chunk in self.data for entry in chunk["choices"]]
        return [e["delta"][key] for e in entries if e["index"] == index and e["delta"].get(key)]

    def finish_reasons(self) -> list[str]:
        """Return the finish reasons of all choices, in the order of the stream."""
        entries = [entry for chunk in self.data for entry in chunk["choices"]]
        return [entry["finish_reason"] for entry in entries if entry["finish_reason"]]


@dataclass
class ApiClient:
    """An app with a fake generator, and a client of the app."""

    generator: FakeGenerator = field(default_factory=lambda: FakeGenerator(tiny_tokenizer()))
    status: FakeStatus = field(default_factory=FakeStatus)
    options: ApiOptions = field(default_factory=ApiOptions)
    context_length: int = 500
    defaults: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    aliases: tuple[str, ...] = ()
    journal: Journal = field(default_factory=Journal)
    fingerprint: str = "f"
    nbytes: int = 0
    images: ImageEncoder = field(default_factory=ImageEncoder)
    embedder: Embedder | None = None

    def __post_init__(self) -> None:
        model = ModelInfo(
            "tiny",
            self.context_length,
            self.defaults,
            self.aliases,
            created=7,
            fingerprint=self.fingerprint,
            family="qwen3_5_moe",
            quantization="4-bit",
            nbytes=self.nbytes,
        )
        tokenizer = self.generator.tokenizer
        others: Any = {"images": self.images, "embedder": self.embedder}
        parts = Api(self.generator, tokenizer, model, self.status, self.options, **others)
        self.app = create_app(parts, journal=self.journal)

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        """Open an HTTP client of the app."""
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport,
            base_url="http://test",
            headers={"Content-Type": "application/json"},
        ) as client:
            yield client

    async def get(self, path: str, **options: Any) -> httpx.Response:
        """Send a GET request."""
        async with self.http() as client:
            return await client.get(path, **options)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Send a POST request with `body` as JSON, or as it is if it is bytes."""
        async with self.http() as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, **options)

    async def chat(self, **body: Any) -> httpx.Response:
        """Send a chat completion request with one short message."""
        return await self.post("/v1/chat/completions", {"messages": [USER], **body})

    async def complete(self, **body: Any) -> httpx.Response:
        """Send a completion request with a short prompt."""
        return await self.post("/v1/completions", {"prompt": "Hi", **body})

    async def stream(self, path: str = "/v1/chat/completions", **body: Any) -> Events:
        """Send a streamed request and return the whole stream."""
        asked = {"messages": [USER]} if "chat" in path else {"prompt": "Hi"}
        response = await self.post(path, {**asked, "stream": True, **body})
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        return Events.read(response.status_code, response.text)


def api_saying(text: str, **options: Any) -> ApiClient:
    """Return an API whose model answers with `text`. The template of a chat has opened a think block before it."""
    return ApiClient(FakeGenerator(tiny_tokenizer(), text, **options))


def post_scope(path: bytes) -> dict[str, Any]:
    """Return the ASGI scope of a POST request with a JSON body."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path.decode("latin-1"),
        "raw_path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("test", 1),
        "server": ("test", 80),
    }


class DisconnectingClient:
    """A client that sends one POST to an ASGI app, records what the app sends, and can disconnect.

    `received` is everything sent so far, `writes` the same by write.
    """

    def __init__(self, api: ApiClient, path: str, body: dict[str, Any]) -> None:
        self.received = bytearray()
        self.writes: list[bytes] = []
        self.status: int | None = None
        self._left = asyncio.Event()
        self._news = asyncio.Condition()
        self._body: bytes | None = json.dumps(body).encode()
        scope = post_scope(path.encode())
        self.task = asyncio.create_task(api.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.received += message.get("body", b"")
        self.writes.append(message.get("body", b""))
        async with self._news:
            self._news.notify_all()

    async def wait_for(self, what: bytes, start: int = 0) -> None:
        """Wait until the app has sent `what` after the first `start` bytes."""
        async with asyncio.timeout(PATIENCE), self._news:
            await self._news.wait_for(lambda: what in self.received[start:])

    async def disconnect(self) -> None:
        """Disconnect, and wait until the app's task ends."""
        self._left.set()
        async with asyncio.timeout(PATIENCE):
            await self.task
