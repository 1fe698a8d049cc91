"""Server-sent events of a running coordinator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from coordinator.cli.http_call import API_KEY
from proto.errors import AccessError, NotReadyError, UsageError, WorkerLostError


def stream_events(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Send a streamed request and yield the data of each event.

    Raises UsageError for a refused request, AccessError for a refused key, NotReadyError if no server answers, and
    WorkerLostError for an error in the stream.
    """
    try:
        with client.stream("POST", path.removeprefix("/"), json={**body, "stream": True}) as reply:
            if reply.status_code != 200:
                raise _refusal(reply.status_code, _message(reply.read()))
            for line in reply.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise WorkerLostError(str(event["error"].get("message", event["error"])))
                yield event
    except httpx.TransportError as error:
        raise NotReadyError(
            f"no answer from {client.base_url} ({type(error).__name__}). Start mtp-coord serve, or give its --url"
        ) from error


def _refusal(status: int, message: str) -> Exception:
    if status == 401:
        return AccessError(f"the server requires an API key. Give one with --api-key or {API_KEY}")
    if status in (502, 503, 504):
        return NotReadyError(f"the server is not ready: {message}")
    if status >= 500:
        return WorkerLostError(f"the server failed with status {status}: {message}")
    return UsageError(f"the server refused the request: {message}")


def _message(body: bytes) -> str:
    """Return the message of an error body, or that another program answered."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "another program answered. Give the --url of an mtp-coord serve"
