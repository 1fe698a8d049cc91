"""Talks to the API as a client would, without sockets: over ASGI, whole or event by event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from coordinator.api.app import create_app
from coordinator.api.context import ApiOptions
from coordinator.text.model_info import ModelInfo
from coordinator.text.tokenizer import Tokenizer
from proto.params import SamplingParams
from tests.support.api.fake_generator import FakeGenerator, FakeStatus
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer

PATIENCE = 60.0
"""Seconds for what is bound to come: on a machine in use only a clock would say that it did not."""

USER = {"role": "user", "content": "Hi"}


@cache
def tiny_tokenizer() -> Tokenizer:
    """One tokenizer for all tests: it never changes."""
    with TemporaryDirectory() as folder:
        return Tokenizer.load(write_tokenizer(Path(folder)))


@dataclass
class Events:
    """What a stream held: its data as JSON objects, its comments, whether it was ended by [DONE]."""

    status: int
    data: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    done: bool = False

    @classmethod
    def read(cls, status: int, text: str) -> Events:
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
        """The non-empty `key` of each delta of a chat's choice."""
        entries = [entry for chunk in self.data for entry in chunk["choices"]]
        return [e["delta"][key] for e in entries if e["index"] == index and e["delta"].get(key)]

    def finish_reasons(self) -> list[str]:
        entries = [entry for chunk in self.data for entry in chunk["choices"]]
        return [entry["finish_reason"] for entry in entries if entry["finish_reason"]]


@dataclass
class ApiClient:
    """An app over a fake generator, and a client of it."""

    generator: FakeGenerator = field(default_factory=lambda: FakeGenerator(tiny_tokenizer()))
    status: FakeStatus = field(default_factory=FakeStatus)
    options: ApiOptions = field(default_factory=ApiOptions)
    context_length: int = 500
    defaults: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    replan: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        model = ModelInfo("tiny", self.context_length, self.defaults, created=7)
        tokenizer = self.generator.tokenizer
        self.app = create_app(
            self.generator, tokenizer, model, self.status, self.options, self.replan
        )

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client

    async def get(self, path: str, **options: Any) -> httpx.Response:
        async with self.http() as client:
            return await client.get(path, **options)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        async with self.http() as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, **options)

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"messages": [USER], **body})

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": "Hi", **body})

    async def stream(self, path: str = "/v1/chat/completions", **body: Any) -> Events:
        asked = {"messages": [USER]} if "chat" in path else {"prompt": "Hi"}
        response = await self.post(path, {**asked, "stream": True, **body})
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        return Events.read(response.status_code, response.text)


class LeavingClient:
    """Sends one POST straight to an ASGI app, hears what is sent, and leaves when told to."""

    def __init__(
        self, api: ApiClient, path: str, body: dict[str, Any], seconds_to_read: float = 0.0
    ) -> None:
        self.seconds_to_read = seconds_to_read
        self.heard = bytearray()
        self.status: int | None = None
        self._left = asyncio.Event()
        self._news = asyncio.Condition()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self.task = asyncio.create_task(api.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await asyncio.sleep(self.seconds_to_read)
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.heard += message.get("body", b"")
        async with self._news:
            self._news.notify_all()

    async def hear(self, what: bytes, start: int = 0) -> None:
        """Wait until `what` was sent, behind the first `start` bytes."""
        async with asyncio.timeout(PATIENCE), self._news:
            await self._news.wait_for(lambda: what in self.heard[start:])

    async def leave(self) -> None:
        """Go away, and wait until the app has noticed."""
        self._left.set()
        async with asyncio.timeout(PATIENCE):
            await self.task
