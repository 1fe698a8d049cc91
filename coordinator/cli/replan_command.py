"""`mtp-coord replan`: let a running cluster use the workers that are ready now."""

from __future__ import annotations

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
from coordinator.cli.status_command import fetch, parse
from coordinator.status.cluster_status import ClusterStatus
from proto.errors import DeadlineError

POLL_SECONDS = 0.25
"""Seconds between two looks at the status."""


def replan(
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    port: PortOption = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the result; 0 does not wait.")
    ] = 600.0,
) -> None:
    """Look for a better plan over all workers, including those that joined since, and show the result.

    If there is one, open answers pause while layers move, and continue. Otherwise the plan stays as it is.
    """
    url = server_url(url, port)
    before = parse(fetch(url, api_key))
    call("POST", url, "/replan", api_key, expected=202)
    if wait == 0:
        typer.echo("looking for a better plan; mtp-coord status shows the plan that serves")
        return
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        status = parse(fetch(url, api_key))
        if status.replans > before.replans and (status.ready or status.phase == "without a plan"):
            typer.echo(_result(status))
            return
        time.sleep(POLL_SECONDS)
    raise DeadlineError(
        f"no result after {wait:g} s. The server goes on; mtp-coord status shows its state"
    )


def _result(status: ClusterStatus) -> str:
    nodes = ", ".join(f"{node.name} {node.span}" for node in status.nodes if node.span)
    return f"{status.replan_result}. Layers: {nodes}" if nodes else status.replan_result
