"""`mtp-coord trace`: the path of every frame of the last seconds through all processes, as a file."""

from __future__ import annotations

import json
from pathlib import Path
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
from proto.errors import ProtocolError, UsageError

TRACE_SECONDS = 30.0
"""Seconds. Deadline of the call: the coordinator collects the times of all workers first."""

MAX_TRACE_BYTES = 256 * 2**20
"""Bytes. Bound on the answer: 8192 frames through 64 stages stay below."""


def trace(
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    port: PortOption = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds before now to show.")
    ] = 5.0,
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("trace.json"),
) -> None:
    """Write the path of every frame of the last seconds through coordinator and workers to a file.

    Open the file at https://ui.perfetto.dev or chrome://tracing. A table of the median times goes to stdout.
    """
    body = call(
        "GET",
        server_url(url, port),
        f"/trace?seconds={seconds:g}",
        api_key,
        deadline=TRACE_SECONDS,
        max_bytes=MAX_TRACE_BYTES,
    )
    try:
        found = json.loads(body)
        table, events = found["table"], found["trace"]
    except (ValueError, KeyError, TypeError):
        raise ProtocolError(f"{url} did not answer with a trace") from None
    try:
        output.write_text(json.dumps(events))
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}") from error
    typer.echo(table)
    typer.echo(
        f"\n{len(events['traceEvents'])} events in {output}. Open it at https://ui.perfetto.dev"
    )
