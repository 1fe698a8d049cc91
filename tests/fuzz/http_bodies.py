"""The fuzz target of HTTP bodies: every dialect's requests, through the whole app, with a scripted generator."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from tests.fuzz.mutation import SEPARATOR
from tests.support.api.api_client import ApiClient, post_scope

CRASHES = (b"internal server error", b"Traceback")
"""Parts of answers that only a defect of the server produces."""


@cache
def _api() -> tuple[ApiClient, asyncio.AbstractEventLoop]:
    """Return the app and the event loop that all inputs share."""
    return ApiClient(), asyncio.new_event_loop()


def fuzz_http(data: bytes) -> None:
    """Send a body to a path. The answer is complete, and is never an internal error."""
    path, _, body = data.partition(SEPARATOR)
    api, loop = _api()
    status, content = loop.run_until_complete(_post(api, path, body))
    api.generator.requests.clear()
    api.generator.cancelled.clear()
    assert 200 <= status < 500, status
    assert not any(crash in content for crash in CRASHES), content


async def _post(api: ApiClient, path: bytes, body: bytes) -> tuple[int, bytes]:
    """Return status and content of the answer to a POST request."""
    messages: list[dict[str, Any]] = []
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    answered = asyncio.Event()

    async def receive() -> dict[str, Any]:
        """Return the body, then wait until the answer is complete."""
        if parts:
            return parts.pop()
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        """Record a part of the answer."""
        messages.append(message)

    await api.app(post_scope(path), receive, send)
    answered.set()
    content = b"".join(message.get("body", b"") for message in messages)
    assert not messages[-1].get("more_body", False), "the answer has no end"
    return int(messages[0]["status"]), content
