"""`mtp-coord top`: a live full-screen view of a running cluster, from the page's event stream."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.live import Live

from coordinator.cli.http_call import (
    API_KEY,
    DEFAULT_URL,
    KeyOption,
    PortOption,
    UrlOption,
    authorization,
    server_url,
)
from coordinator.cli.live_view import LiveView, parse_events
from coordinator.cli.top_screen import render_top
from proto.errors import AccessError, NotReadyError, ProtocolError

SILENCE_SECONDS = 25.0
"""Seconds without a byte after which the coordinator counts as gone. It sends a comment every 10 s."""

RETRY_SECONDS = 1.0
"""Seconds. Delay before the next attempt to reach a coordinator that was lost."""


def top(
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    port: PortOption = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one screen and exit, as in a pipe.")
    ] = False,
) -> None:
    """Watch a running cluster: stages and the slow one, time computed, acceptance, requests, events. Ctrl-C ends it.

    **computes** is the share of the last seconds in which a stage computed. The rest is waiting: a gap in the page's
    timeline. **layers** shows attention layers as full blocks, GDN layers as shaded ones and the MTP head as a diamond.
    """
    root = server_url(url, port)
    console = Console(emoji=False)
    view = LiveView()
    if once or not sys.stdout.isatty():
        next(watch(root, api_key, view))
        console.print(render_top(view, console.width))
        return
    updates = watch(root, api_key, view)
    next(updates)
    with Live(render_top(view, console.width), console=console, screen=True) as live:
        while True:
            try:
                for _ in updates:
                    live.update(render_top(view, console.width))
            except NotReadyError as error:
                view.status["activity"] = f"{error}. Trying again"
                view.status["ready"] = False
                live.update(render_top(view, console.width))
            time.sleep(RETRY_SECONDS)
            updates = watch(root, api_key, view)


def watch(root: str, api_key: str | None, view: LiveView) -> Iterator[None]:
    """Apply the events of a coordinator to `view`, and yield after each.

    Raises NotReadyError without an answer, AccessError if the key is refused, ProtocolError for another answer.
    """
    try:
        with (
            httpx.Client(headers=authorization(api_key), timeout=SILENCE_SECONDS) as client,
            client.stream("GET", f"{root}/v1/events") as reply,
        ):
            if reply.status_code == 401:
                raise AccessError(
                    f"{root} requires an API key. Give one with --api-key or {API_KEY}"
                )
            if reply.status_code != 200:
                raise ProtocolError(
                    f"{root} answered with status {reply.status_code}. "
                    "Give the --url of an mtp-coord serve of this release"
                )
            for name, data in parse_events(reply.iter_lines()):
                view.apply(name, data)
                yield
    except httpx.TransportError as error:
        raise NotReadyError(
            f"no coordinator answers at {root} ({type(error).__name__}). Start mtp-coord serve, or give its --url"
        ) from error
