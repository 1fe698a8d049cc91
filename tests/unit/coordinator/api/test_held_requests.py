"""Requests that wait while the model changes."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.api import held_requests
from coordinator.api.held_requests import HeldRequests
from coordinator.api.request.context import ApiOptions
from coordinator.api.starting_app import SwitchedApp, starting_app
from tests.support.api.api_client import PATIENCE, USER, ApiClient

CHAT = {"messages": [USER], "max_tokens": 2}
KEY = {"Authorization": "Bearer k"}


def held(api: ApiClient) -> HeldRequests:
    """Hold the requests of `api` until its app is put back."""
    app = api.app
    switched = SwitchedApp(app)
    paused = starting_app(api.status, api.options, "The server changes its model.")
    held = HeldRequests(paused, switched, api.options)
    api.app, api.held_app = held, app  # type: ignore[assignment,attr-defined]
    return held


async def test_a_request_for_an_answer_waits_for_the_next_model() -> None:
    """It is answered by the next app. Requests without a key, and those for other paths, are answered at once."""
    api = ApiClient(options=ApiOptions(api_keys=("k",)))
    holding = held(api)
    async with asyncio.timeout(PATIENCE):
        waiting = asyncio.create_task(api.post("/v1/chat/completions", CHAT, headers=KEY))
        assert (await api.post("/v1/chat/completions", CHAT)).status_code == 401
        assert (await api.get("/v1/models", headers=KEY)).status_code == 503
        assert not waiting.done()
        holding.release()
        assert (await waiting).status_code == 200
        assert (await api.post("/v1/chat/completions", CHAT, headers=KEY)).status_code == 200


async def test_the_wait_and_the_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits too long, and one too many, get a 503 that they may repeat."""
    monkeypatch.setattr(held_requests, "MOST_HELD", 1)
    monkeypatch.setattr(held_requests, "HOLD_SECONDS", 0.2)
    api = ApiClient()
    held(api)
    async with asyncio.timeout(PATIENCE):
        waiting = asyncio.create_task(api.post("/v1/chat/completions", CHAT))
        await asyncio.sleep(0.05)
        second = await api.post("/v1/chat/completions", CHAT)
        assert not waiting.done()
        for reply in (second, await waiting):
            assert reply.status_code == 503
            assert reply.headers["retry-after"]
