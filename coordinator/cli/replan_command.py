"""`mtp-coord replan`: have a running cluster use the workers there are now."""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator.cli.http_call import API_KEY, call


def replan(
    url: Annotated[
        str, typer.Option(help="Where mtp-coord serve listens.")
    ] = "http://127.0.0.1:8080",
    api_key: Annotated[
        str | None, typer.Option(envvar=API_KEY, help="One of the server's API keys.")
    ] = None,
) -> None:
    """Look for a better plan over all workers, those that joined since among them.

    Where there is one, open answers pause while layers move, and go on; else the plan stays as it is.
    `mtp-coord status` shows the plan that serves.
    """
    call("POST", url, "/replan", api_key, expected=202)
    typer.echo("looking for a better plan; mtp-coord status shows the one that serves")
