"""`mtp-coord launch`: an agent's program with the settings of this server."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.api.client_settings import AGENTS, NO_KEY, Agent, Endpoint, Setup
from coordinator.cli.client import DEFAULT_URL, KeyOption, UrlOption, call, server_url
from proto.errors import AccessError, NotReadyError, UsageError
from proto.state_dir import state_dir, write_private


def launch(
    agent: Annotated[str, typer.Argument(help=f"The program: {', '.join(AGENTS)}.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the program, after --.")] = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    show: Annotated[bool, typer.Option("--show", help="Print the settings, and start nothing.")] = False,
    write: Annotated[
        bool,
        typer.Option("--write", help="Also keep the settings in the program's own file, after a copy of it."),
    ] = False,
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
    if write:
        _keep(known, setup)
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


OWN_FILES = {
    "claude": (".claude/settings.json", "settings.json"),
    "opencode": (".config/opencode/opencode.json", ""),
    "crush": (".local/share/crush/crush.json", "crush.json"),
    "cline-cli": (".cline/data/settings/providers.json", "providers.json"),
}
"""The JSON file of each program in the home directory, and the file of its settings here; empty for a variable."""


def _keep(agent: Agent, setup: Setup) -> None:
    """Merge the settings into the program's own file. Raises UsageError for a program without one."""
    if agent.name not in OWN_FILES:
        lines = replace(setup, files={}, arguments=()).text(agent.program)
        raise UsageError(
            f"--write: {agent.program} reads no JSON file. Put these lines into your shell's profile instead:\n{lines}"
        )
    place, name = OWN_FILES[agent.name]
    text = setup.files[name] if name else setup.variables["OPENCODE_CONFIG_CONTENT"]
    file = Path.home() / place
    before: dict[str, Any] = {}
    if file.exists():
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"--write: {file} is not plain JSON: {error}. Change it yourself") from error
        shutil.copy2(file, file.with_name(f"{file.name}.before-mtp"))
    write_private(file, json.dumps(_merged(before, json.loads(text)), indent=2) + "\n")
    typer.echo(f"{file}: written. The file before is {file.name}.before-mtp", err=True)


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return `old` with the values of `new`, object by object."""
    found = dict(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if both else value
    return found
