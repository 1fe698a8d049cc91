"""Streams of answers, as clients read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

SECONDS = 120.0


def events_of(url: str, body: Any) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer. Raises AssertionError for one that ends with an error."""
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=SECONDS) as reply:
        assert reply.status_code == httpx.codes.OK, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield event


def tokens_of_stream(url: str, body: Any, after: int, then: Callable[[], object]) -> list[int]:
    """Return the tokens of a streamed answer. Call `then` once `after` tokens have come."""
    found: list[int] = []
    for event in events_of(url, body):
        before = len(found)
        found += [t for choice in event["choices"] for t in choice.get("token_ids") or ()]
        if before < after <= len(found):
            then()
    return found
