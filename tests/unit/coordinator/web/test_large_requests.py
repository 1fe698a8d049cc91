"""Bounds of request bodies: the number of their values, their memory, and the time for which others wait."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.text.tokenizer import Tokenizer
from coordinator.web import context, request_body
from coordinator.web.context import LARGE_BYTES, LargeWork
from coordinator.web.error_responses import request_error
from proto.errors import RequestError
from tests.support.api.api_client import PATIENCE, ApiClient
from tests.support.api.fake_generator import FakeGenerator
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer


@pytest.mark.parametrize(
    ("unit", "word"),
    [
        (b'{"role": "user", "content": "a"}', "fields"),
        (b"[]", "fields"),
        (b"1", "values"),
        (b'"a"', "values"),
    ],
)
async def test_a_body_of_many_values_is_refused(monkeypatch: pytest.MonkeyPatch, unit: bytes, word: str) -> None:
    """A body with more values than the bounds is a 400 that names the bound, before it is parsed."""
    monkeypatch.setattr(request_body, "MAX_FIELDS", 200)
    monkeypatch.setattr(request_body, "MAX_ITEMS", 300)
    monkeypatch.setattr(request_body, "parse_body", None)
    content = b'{"messages": [' + b",".join([unit] * 1000) + b"]}"
    async with ApiClient().http() as client:
        response = await client.post("/v1/chat/completions", content=content)
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "messages", 1),
        ("/v1/completions", "prompt", {}),
        ("/v1/messages", "messages", 1),
        ("/v1/responses", "input", 1),
        ("/api/chat", "messages", 1),
    ],
)
async def test_a_list_of_errors_costs_one_error(
    monkeypatch: pytest.MonkeyPatch, path: str, field: str, value: object
) -> None:
    """A list with thousands of wrong values is refused at its first one. Each type of a union may have one."""
    counts: list[int] = []

    def count_errors(errors: list[Any]) -> RequestError:
        """Record the number of error objects."""
        counts.append(len(errors))
        return request_error(errors)

    monkeypatch.setattr(request_body, "request_error", count_errors)
    content = json.dumps({"model": "tiny", "max_tokens": 1, field: [value] * 15_000})
    async with ApiClient().http() as client:
        response = await client.post(path, content=content)
    assert response.status_code == 400
    assert len(counts) == 1
    assert counts[0] <= 4


async def test_others_are_answered_while_a_large_text_is_encoded() -> None:
    """The event loop runs while the tokenizer works on a text of the largest body."""
    client = ApiClient(context_length=10**7)
    longest, ended = 0.0, asyncio.Event()

    async def tick() -> None:
        """Measure how long the event loop does not run."""
        nonlocal longest
        while not ended.is_set():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - began)

    ticking = asyncio.create_task(tick())
    began = time.perf_counter()
    async with client.http() as http:
        prompt = "some words of a text " * 12_000
        response = await http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 1})
    whole = time.perf_counter() - began
    ended.set()
    await ticking
    assert response.status_code == 200, response.text
    assert longest < whole / 2


async def test_large_work_runs_one_at_a_time_beside_small_work() -> None:
    """The server works on one large request at a time, and a small one does not wait for them."""
    work, running, most = LargeWork(), 0, 0
    begun, may_end = threading.Event(), threading.Event()

    def compute() -> None:
        """Count the calls at the same time."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        begun.set()
        assert may_end.wait(PATIENCE)
        running -= 1

    large = [asyncio.create_task(work.run(LARGE_BYTES + 1, compute)) for _ in range(4)]
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        await work.run(10, lambda: None)
        assert not any(task.done() for task in large)
        may_end.set()
        await asyncio.gather(*large)
    assert most == 1


async def test_the_memory_of_large_bodies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large body above the memory of all is a 429 with Retry-After; small ones are answered. All is free again."""
    monkeypatch.setattr(context, "MAX_OPEN_BYTES", 10 * LARGE_BYTES)
    client = ApiClient()
    work = client.app.state.api.large_work
    async with client.http() as http:
        with work.reading() as reserve:
            reserve(8 * LARGE_BYTES)
            large: dict[str, Any] = {"model": "tiny", "prompt": "a" * 4 * LARGE_BYTES}
            response = await http.post("/v1/completions", json=large)
            assert (response.status_code, response.headers["retry-after"]) == (429, "5")
            small = {"model": "tiny", "prompt": "a", "max_tokens": 1}
            assert (await http.post("/v1/completions", json=small)).status_code == 200
        assert work.open_bytes == 0
        response = await http.post("/v1/completions", json=large)
        assert response.status_code == 400  # longer than the context
    assert work.open_bytes == 0


@pytest.mark.parametrize("words", [600, 60_000])
async def test_a_prompt_of_any_length_beyond_the_context_has_the_known_words(words: int, tmp_path: Path) -> None:
    """Agents compact their history by OpenAI's code and Anthropic's words, also far beyond the context."""
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    tokenizer.max_tokens = 500
    api = ApiClient(FakeGenerator(tokenizer))
    text = "some words " * (words // 2)
    messages = [{"role": "user", "content": text}]
    for path, body, param in (
        ("/v1/chat/completions", {"messages": messages}, "messages"),
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/responses", {"input": text}, "input"),
    ):
        response = await api.post(path, body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (
            400,
            "context_length_exceeded",
            param,
        )
        assert "500 tokens" in error["message"]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = await api.post(path, {"messages": messages, "max_tokens": 5})
        if words > 600 or not path.endswith("count_tokens"):
            message = response.json()["error"]["message"]
            assert re.fullmatch(r"prompt is too long: (\d+) tokens > 500 maximum", message)
    response = await api.post("/api/generate", {"model": "tiny", "prompt": text, "raw": True})
    assert (response.status_code, "500 tokens" in response.text) == (400, True)
