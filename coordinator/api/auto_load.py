"""The change of the model that a request names, before the request is answered (`serve --auto-load`)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.ollama.names import TAG
from coordinator.api.request.body import has_valid_key
from coordinator.api.request.context import ApiOptions
from coordinator.models.loader import ModelLoader
from proto.errors import ClusterError

log = logging.getLogger(__name__)

PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/api/generate",
    }
)
"""The paths whose bodies name a model."""


class AutoLoad:
    """An ASGI app that loads the model of a request first, if it is on this machine, and forwards to `app`.

    The request must carry a valid key. `app` answers everything else, errors included. `switch` is None until the
    server has a model.
    """

    def __init__(self, app: ASGIApp, options: ApiOptions) -> None:
        self.switch: ModelLoader | None = None
        self._app = app
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if (
            self.switch is None
            or scope["type"] != "http"
            or scope["method"] != "POST"
            or scope["path"] not in PATHS
            or not has_valid_key(Request(scope), self._options)
        ):
            await self._app(scope, receive, send)
            return
        messages = await self._read(receive)
        name = _model_named_in(messages)
        if name is not None:
            await self._load(self.switch, name)
        await self._app(scope, _replayed(messages, receive), send)

    async def _load(self, switch: ModelLoader, name: str) -> None:
        if not switch.can_load(name):
            name = name.removesuffix(TAG)
        if not switch.can_load(name):
            return
        try:
            await switch.load(name)
        except ClusterError as error:  # the app refuses the request with the advice for this model
            log.warning("model not loaded", extra={"model": name, "error": str(error)})

    async def _read(self, receive: Receive) -> list[Message]:
        """Return the messages of the body, or its beginning if it is too large or too slow."""
        messages: list[Message] = []
        size = 0
        try:
            async with asyncio.timeout(self._options.body_seconds):
                while size <= self._options.max_body_bytes:
                    message = await receive()
                    messages.append(message)
                    size += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body"):
                        break
        except TimeoutError:
            log.debug("body too slow to look for a model in it")
        return messages


def _model_named_in(messages: Sequence[Message]) -> str | None:
    """Return the model that a complete JSON body names, or None."""
    try:
        body: Any = json.loads(b"".join(message.get("body", b"") for message in messages))
    except (ValueError, RecursionError):
        return None
    name = body.get("model") if isinstance(body, dict) else None
    return name if isinstance(name, str) and name != "default_model" else None


def _replayed(messages: Sequence[Message], receive: Receive) -> Receive:
    """Return a `receive` that repeats `messages` first."""
    waiting = list(messages)

    async def replay() -> Message:
        """Return the next message."""
        return waiting.pop(0) if waiting else await receive()

    return replay
