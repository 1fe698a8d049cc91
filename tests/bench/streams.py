"""A client that records the arrival time of each piece of an answer."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT = 300.0
"""Seconds. Maximum time of an answer."""


@dataclass(frozen=True)
class Streamed:
    """One answer. `times` are the seconds from the request to each piece of text."""

    times: tuple[float, ...]
    prompt_tokens: int
    tokens: int
    cached_tokens: int

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.times[0]

    @property
    def gap(self) -> float:
        """Median seconds between pieces. With `write_random_model` each piece is a token."""
        assert len(self.times) >= self.tokens - 2, "a piece of text is not a token here"
        return statistics.median(b - a for a, b in zip(self.times, self.times[1:-1], strict=False))


async def stream(
    url: str, model: str, prompt: str | Sequence[int], tokens: int, **more: Any
) -> Streamed:
    """Stream a greedy completion of `tokens` tokens. `more` goes into the request.

    Raises AssertionError if the server does not serve it. Lines are recorded as they arrive and parsed afterwards,
    because the client shares the cores with the server.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    started = time.perf_counter()
    async with asyncio.timeout(TIMEOUT):
        lines = [
            (time.perf_counter() - started, line) async for line in _post(url, json.dumps(body))
        ]
    events = [
        (at, json.loads(line.removeprefix(b"data: ")))
        for at, line in lines
        if line[:7] == b"data: {"
    ]
    assert events, f"{url} answered {lines[:20]}"
    times = [at for at, event in events if any(choice.get("text") for choice in event["choices"])]
    usage = events[-1][1]["usage"]
    details = usage.get("prompt_tokens_details") or {}
    found = Streamed(
        tuple(times),
        usage["prompt_tokens"],
        usage["completion_tokens"],
        details.get("cached_tokens", 0),
    )
    assert found.tokens == tokens, f"{url}: {found.tokens} tokens instead of {tokens}"
    return found


async def _post(url: str, body: str) -> AsyncIterator[bytes]:
    """Yield the lines of the answer, including headers. An event is never split over two chunks."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    data = body.encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    try:
        while line := await reader.readline():
            yield line
            if line.startswith(b"data: [DONE]"):
                return
    finally:
        writer.close()


def ask(url: str, model: str, prompt: str | Sequence[int], tokens: int, **more: Any) -> Streamed:
    """Stream one answer and return it."""
    return asyncio.run(stream(url, model, prompt, tokens, **more))


def throughput(url: str, model: str, prompts: Sequence[str], tokens: int) -> float:
    """Return the tokens per second of all answers requested at once, including their prompts."""

    async def all_at_once() -> None:
        """Request all answers at once."""
        await asyncio.gather(*(stream(url, model, prompt, tokens) for prompt in prompts))

    started = time.perf_counter()
    asyncio.run(all_at_once())
    return len(prompts) * tokens / (time.perf_counter() - started)
