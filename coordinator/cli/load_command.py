"""`mtp-coord load`: change the model of a running server without a restart."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from coordinator.cli.http_call import (
    DEFAULT_URL,
    KeyOption,
    PortOption,
    UrlOption,
    call,
    server_url,
)
from coordinator.status.load_report import LoadReport
from proto.errors import DeadlineError, NotReadyError
from proto.terminal.progress_bar import byte_bar

POLL_SECONDS = 0.25
"""Seconds between two looks at the progress."""

PATH = "/v1/models/load"


def load(
    model: Annotated[
        str, typer.Argument(help="A model that GET /v1/models lists, or a repo of the hub.")
    ],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    port: PortOption = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the model; 0 does not wait.")
    ] = 3600.0,
) -> None:
    """Serve another model without a restart. The key needs the scope admin.

    The present model serves until the new one is loaded, where memory allows, and else until the files of the new one
    are there. Its open answers have a minute to finish.
    """
    url = server_url(url, port)
    report = _report(call("POST", url, PATH, api_key, 202, content={"model": model}))
    deadline = time.monotonic() + wait
    while report.running and time.monotonic() < deadline:
        phase = report.phase
        with byte_bar(f"{phase}: {model}") as show:
            while report.phase == phase and time.monotonic() < deadline:
                show(report.done, report.total)
                time.sleep(POLL_SECONDS)
                report = _report(call("GET", url, PATH, api_key))
    if report.note:
        typer.echo(report.note)
    if report.phase == "failed":
        raise NotReadyError(f"the model was not changed: {report.error}")
    if report.running and wait:
        raise DeadlineError(f"no result after {wait:g} s. The server goes on with the change")
    typer.echo("the server changes the model" if report.running else f"{model} serves")


def _report(body: bytes) -> LoadReport:
    return LoadReport(**json.loads(body))
