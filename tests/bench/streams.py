"""A client that notes when each piece of an answer came."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

TIMEOUT = 300.0
"""Seconds a server may be silent: stock mlx-lm says nothing while it prefills."""


@dataclass(frozen=True)
class Streamed:
    """One answer. `times` are seconds from the request to each piece of text."""

    times: tuple[float, ...]
    prompt_tokens: int
    tokens: int
    cached_tokens: int

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def gap(self) -> float:
        """Median seconds between pieces; with `write_random_model` each piece is a token."""
        assert len(self.times) >= self.tokens - 2, "a piece of text is not a token here"
        return statistics.median(b - a for a, b in zip(self.times, self.times[1:-1], strict=False))


async def stream(url: str, model: str, prompt: str, tokens: int) -> Streamed:
    """A greedy completion of `tokens` tokens. Raises httpx.HTTPError when the server does not serve it."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    usage: dict[str, object] = {}
    started = time.perf_counter()
    async with (
        httpx.AsyncClient(timeout=TIMEOUT) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if any(choice.get("text") for choice in event["choices"]):
                times.append(time.perf_counter() - started)
            usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    assert isinstance(details, dict)
    found = Streamed(
        tuple(times),
        int(str(usage["prompt_tokens"])),
        int(str(usage["completion_tokens"])),
        int(details.get("cached_tokens", 0)),
    )
    assert found.tokens == tokens, f"{url}: {found.tokens} tokens instead of {tokens}"
    return found


def ask(url: str, model: str, prompt: str, tokens: int) -> Streamed:
    """One answer, nothing else under way."""
    return asyncio.run(stream(url, model, prompt, tokens))


def throughput(url: str, model: str, prompts: Sequence[str], tokens: int) -> float:
    """Tokens a second of all these answers asked for at once, their prompts included in the time."""

    async def all_at_once() -> None:
        await asyncio.gather(*(stream(url, model, prompt, tokens) for prompt in prompts))

    started = time.perf_counter()
    asyncio.run(all_at_once())
    return len(prompts) * tokens / (time.perf_counter() - started)
