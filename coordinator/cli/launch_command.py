"""`mtp-coord launch`: an agent's program with the settings of this server."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Annotated, Any

import typer

from coordinator.cli.client import DEFAULT_URL, KeyOption, UrlOption, call, server_url
from coordinator.serve.client_settings import AGENTS, NO_KEY, Endpoint
from proto.errors import AccessError, NotReadyError, UsageError
from proto.state_dir import state_dir, write_private


def launch(
    agent: Annotated[str, typer.Argument(help=f"The program: {', '.join(AGENTS)}.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the program, after --.")] = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    show: Annotated[bool, typer.Option("--show", help="Print the settings, and start nothing.")] = False,
) -> None:
    """Start an agent's program against a running server, with every setting that it needs.

    Its own settings stay as they are: address, key, models and context size go by variables, arguments and a file in
    the state directory. `mtp-coord launch claude -- --continue` passes arguments on.
    """
    if agent not in AGENTS:
        raise UsageError(f"launch {agent!r:.40}: no such program. Known are {', '.join(AGENTS)}")
    known = AGENTS[agent]
    setup = known.setup(_endpoint(url, api_key))
    directory = state_dir(None) / "launch" / agent
    setup = setup.placed(str(directory))
    if show:
        typer.echo(setup.text(known.program))
        return
    program = shutil.which(known.program)
    if program is None:
        raise UsageError(f"{known.program} is not installed. Install it: {known.install}")
    for name, content in setup.files.items():
        write_private(directory / name, content)
    sys.stdout.flush()
    environment = {n: v for n, v in os.environ.items() if n not in setup.cleared}
    os.execve(program, [program, *setup.arguments, *(arguments or ())], {**environment, **setup.variables})


def _endpoint(url: str, api_key: str | None) -> Endpoint:
    """Return the server at `url`. Raises the errors of `call`, and NotReadyError while no model serves."""
    # The owner's key permits everything, so an agent does not get it.
    key = (api_key or NO_KEY).split()[0]
    try:
        listed = json.loads(call("GET", url, "/v1/models", key))["data"]
    except AccessError as error:
        wrong = "refuses this key" if api_key else "needs a key"
        raise AccessError(
            f"{url} {wrong}. Create one with mtp-coord key create NAME, and give it with --api-key"
        ) from error
    served: dict[str, Any] | None = next((one for one in listed if one.get("loaded")), None)
    if served is None:
        raise NotReadyError(f"{url} serves no model yet. See mtp-coord status")
    return Endpoint(server_url(url), key, served["id"], served["max_model_len"])
