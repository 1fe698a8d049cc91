"""Two well-behaved clients, whose latencies show what other clients cost: one streams, one sends small requests."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httpx

STREAM_TOKENS = 200
"""Tokens of each streamed answer."""

SMALL_TOKENS = 4
PAUSE_SECONDS = 0.2
"""Seconds between two small requests."""

BURST_SECONDS = 0.001
"""Seconds. Pieces that arrive within them came together."""

LONGEST_SECONDS = 120.0
"""Seconds. Longest silence of a stream before the client gives up."""


@dataclass
class Latencies:
    """The measurements of both clients in seconds, and the statuses of requests that were refused or cut."""

    gaps: list[float] = field(default_factory=list)
    """Seconds between two pieces of a stream."""
    first: list[float] = field(default_factory=list)
    """Seconds from a small request to its first piece."""
    refused: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, object]:
        """Return the figures for a table, in milliseconds."""
        return {
            "gap_median_ms": quantile(self.gaps, 0.5),
            "gap_p99_ms": quantile(self.gaps, 0.99),
            "gap_longest_ms": quantile(self.gaps, 1.0),
            "first_median_ms": quantile(self.first, 0.5),
            "first_p99_ms": quantile(self.first, 0.99),
            "small_answers": len(self.first),
            "refused": dict(self.refused),
        }


def quantile(seconds: Sequence[float], share: float) -> float | None:
    """Return a quantile in milliseconds, or None without a measurement."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


async def measure_latencies(url: str, model: str, seconds: float, key: str = "") -> Latencies:
    """Run both clients for `seconds` and return their measurements. They send the API key `key`, if there is one."""
    found = Latencies()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, timeout=LONGEST_SECONDS, headers=headers) as client:
        tasks = [
            asyncio.create_task(_stream(client, model, found)),
            asyncio.create_task(_send_small(client, model, found)),
        ]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
            raise error
    return found


async def _stream(client: httpx.AsyncClient, model: str, found: Latencies) -> None:
    """Stream one answer after the other. A silence that the end of the measurement cuts off counts too."""
    while True:
        last = 0.0
        try:
            async for now in pieces(client, model, STREAM_TOKENS):
                if last and now - last > BURST_SECONDS:
                    found.gaps.append(now - last)
                last = now
        except (RuntimeError, httpx.HTTPError) as error:
            found.refused[f"stream: {_reason(error)}"] += 1
            await asyncio.sleep(PAUSE_SECONDS)
        except asyncio.CancelledError:
            if last:
                found.gaps.append(time.perf_counter() - last)
            raise


async def _send_small(client: httpx.AsyncClient, model: str, found: Latencies) -> None:
    """Send small requests. One that is refused is sent again after a pause, and its wait counts from its first try."""
    began = 0.0
    while True:
        began = began or time.perf_counter()
        try:
            async for now in pieces(client, model, SMALL_TOKENS):
                if began:
                    found.first.append(now - began)
                began = 0.0
        except (RuntimeError, httpx.HTTPError) as error:
            found.refused[f"small: {_reason(error)}"] += 1
        except asyncio.CancelledError:
            if began:
                found.first.append(time.perf_counter() - began)
            raise
        await asyncio.sleep(PAUSE_SECONDS)


async def pieces(client: httpx.AsyncClient, model: str, tokens: int) -> AsyncIterator[float]:
    """Yield the time of each piece of a streamed answer. Raises RuntimeError with the status of a refused request."""
    body = {
        "model": model,
        "prompt": f"def read_{random.randrange(10**6)}(path):\n",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError(str(reply.status_code))
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["message"][:60])
                yield time.perf_counter()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RuntimeError) else type(error).__name__
