"""`mtp-coord generate --url`: one prompt to a running coordinator, its answer to stdout."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx
import typer

from coordinator.cli.event_stream import stream_events
from coordinator.cli.http_call import authorization, call, server_url
from coordinator.cli.shown_text import ShownText
from proto.errors import ProtocolError

SILENCE_SECONDS = 600.0
"""Seconds without a byte after which the call fails. The server sends keep-alive comments every 10 s."""


@dataclass(frozen=True)
class RemoteRequest:
    """One request. `fields` are those of the API; `raw` continues the text without a chat template."""

    url: str
    api_key: str | None
    text: str
    raw: bool
    fields: dict[str, Any]


def generate_remotely(request: RemoteRequest, *, as_json: bool) -> None:
    """Print the answer to `request` as it arrives, and a summary on stderr. With `as_json` print one JSON object.

    Raises the errors of `stream_events`, and UsageError for a malformed URL.
    """
    root = server_url(request.url, None)
    body = {"model": _served_model(root, request.api_key), **request.fields}
    path = "/completions" if request.raw else "/chat/completions"
    if request.raw:
        body["prompt"] = request.text
    else:
        body["messages"] = [{"role": "user", "content": request.text}]
    body["stream_options"] = {"include_usage": True}
    shown = ShownText(enabled=not as_json)
    usage: dict[str, Any] = {}
    started, first, reason, reasoning = time.monotonic(), 0.0, "", ""
    with httpx.Client(
        base_url=f"{root}/v1", headers=authorization(request.api_key), timeout=SILENCE_SECONDS
    ) as client:
        for event in stream_events(client, path, body):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                first = first or time.monotonic()
                delta = choice.get("delta") or {"content": choice.get("text")}
                reasoning += delta.get("reasoning_content") or ""
                shown.show_reasoning(delta.get("reasoning_content") or "")
                shown.show_content(delta.get("content") or "")
                reason = choice.get("finish_reason") or reason
    if as_json:
        facts = {
            "text": shown.content,
            "reasoning": reasoning,
            "finish_reason": reason,
            "usage": usage,
        }
        typer.echo(json.dumps(facts))
        return
    shown.end_line()
    _summarize(usage, reason, first - started, time.monotonic() - (first or started))


def _served_model(root: str, api_key: str | None) -> str:
    """Return the name of the model that the server serves."""
    body = call("GET", root, "/v1/models", api_key)
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ProtocolError(
            f"{root}/v1/models lists no model. Give the --url of an mtp-coord serve"
        ) from None


def _summarize(usage: dict[str, Any], reason: str, first: float, seconds: float) -> None:
    """Print the figures of the answer on stderr, as a local `generate` does."""
    tokens = usage.get("completion_tokens", 0)
    details = usage.get("completion_tokens_details") or {}
    accepted = details.get("accepted_prediction_tokens", 0)
    drafted = accepted + details.get("rejected_prediction_tokens", 0)
    drafts = f"{accepted} of {drafted} accepted" if drafted else "none"
    typer.echo(
        f"prompt      {usage.get('prompt_tokens', 0)} tokens, first token after {first:.2f} s\n"
        f"generation  {tokens} tokens, {max(0, tokens - 1) / max(seconds, 1e-9):.1f} tokens/s, ended by {reason}\n"
        f"drafts      {drafts}",
        err=True,
    )
