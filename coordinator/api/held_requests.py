"""Requests for answers that wait while the server changes from one model to the next."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.api.auto_load import PATHS
from coordinator.api.request.body import has_valid_key
from coordinator.api.request.context import ApiOptions
from coordinator.api.starting_app import SwitchedApp

HOLD_SECONDS = 90.0
"""Seconds. Longest wait of a request. Open answers have 60 s to finish, and workers connect within seconds."""

MOST_HELD = 256
"""Requests. Later ones are refused with 503, as they would be by a full queue."""


class HeldRequests:
    """An ASGI app that holds requests for answers until `release`, and then sends them to the app of `switched`.

    The requests carry a valid key. `app` answers all other requests, and those that waited too long.
    """

    def __init__(self, app: ASGIApp, switched: SwitchedApp, options: ApiOptions) -> None:
        self._app = app
        self._switched = switched
        self._options = options
        self._released = asyncio.Event()
        self._held = 0

    def release(self) -> None:
        """Hold no request any more."""
        self._released.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if self._holds(scope):
            self._held += 1
            try:
                await asyncio.wait_for(self._released.wait(), HOLD_SECONDS)
            except TimeoutError:
                pass  # `app` refuses the request
            finally:
                self._held -= 1
        following = self._switched.app if self._released.is_set() else self._app
        await (self._app if following is self else following)(scope, receive, send)

    def _holds(self, scope: Scope) -> bool:
        return (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and scope["path"] in PATHS
            and self._held < MOST_HELD
            and has_valid_key(Request(scope), self._options)
        )
