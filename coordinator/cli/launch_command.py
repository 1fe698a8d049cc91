"""`mtp-coord launch`: an agent's program with the settings of this server."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import certifi
import typer

from coordinator.cli.client import KeyOption, UrlOption, call_server
from coordinator.cli.cluster_commands import parse
from coordinator.cli.known_servers import KnownServer, find_server
from coordinator.serve.client_settings import AGENTS, NO_KEY, Agent, Endpoint
from proto.errors import AccessError, ClusterError, NotReadyError, UsageError
from proto.state_dir import read_text, state_dir, write_private

MEASURED_PROMPT = "What is the sum of all numbers from one to ten? " * 20
"""A text of some 250 tokens, whose time tells that of a long prompt. Weights are read for a shorter one too."""


def launch(
    agent: Annotated[str, typer.Argument(help=f"The program: {', '.join(AGENTS)}.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the program, after --.")] = None,
    url: UrlOption = "",
    api_key: KeyOption = None,
    show: Annotated[bool, typer.Option("--show", help="Print the settings, and start nothing.")] = False,
) -> None:
    """Start an agent's program against a running server, with every setting that it needs.

    Its own settings stay as they are: address, key, models and context size go by variables, arguments and a file in
    the state directory. `mtp-coord launch claude -- --continue` passes arguments on. Before the start it says what the
    first prompt costs, where that is known.
    """
    if agent not in AGENTS:
        raise UsageError(f"launch {agent!r:.40}: no such program. Known are {', '.join(AGENTS)}")
    known = AGENTS[agent]
    server = find_server(url, api_key)
    endpoint = _endpoint(server, has_key=bool(api_key))
    setup = known.setup(endpoint)
    directory = state_dir(None) / "launch" / agent
    setup = setup.placed(str(directory))
    setup = replace(setup, variables={**setup.variables, **endpoint.authorities})
    if show:
        typer.echo(setup.text(known.program))
        return
    program = shutil.which(known.program)
    if program is None:
        raise UsageError(f"{known.program} is not installed. Install it: {known.install}")
    for name, content in setup.files.items():
        write_private(directory / name, content)
    if known.first_tokens:
        typer.echo(_first_turn(known, server, endpoint), err=True)
    sys.stdout.flush()
    environment = {n: v for n, v in os.environ.items() if n not in setup.cleared}
    os.execve(program, [program, *setup.arguments, *(arguments or ())], {**environment, **setup.variables})


def _endpoint(server: KnownServer, *, has_key: bool) -> Endpoint:
    """Return what agents need of `server`. Raises the errors of `call`, and NotReadyError while no model serves."""
    # The owner's key permits everything, so an agent does not get it.
    url, key = server.url, server.agent_key or NO_KEY
    try:
        listed = json.loads(call_server("GET", replace(server, key=key), "/v1/models"))["data"]
    except AccessError as error:
        wrong = "refuses this key" if has_key else "needs a key"
        raise AccessError(
            f"{url} {wrong}. Create one with mtp-coord key create NAME, and give it with --api-key"
        ) from error
    served: dict[str, Any] | None = next((one for one in listed if one.get("loaded")), None)
    if served is None:
        raise NotReadyError(f"{url} serves no model yet. See mtp-coord status")
    return Endpoint(url, key, served["id"], served["max_model_len"], _authority_variables(server))


def _first_turn(agent: Agent, server: KnownServer, endpoint: Endpoint) -> str:
    """Return what the first prompt of `agent` costs. A server that has measured no prompt yet computes a short one."""
    text = f"{agent.title} begins with a prompt of about {agent.first_tokens:,} tokens"
    speed = None
    with suppress(ClusterError):
        speed = parse(call_server("GET", server, "/status")).prompt_tokens_per_second
        if speed is None:
            content = {"prompt": MEASURED_PROMPT, "max_tokens": 1}
            call_server("POST", replace(server, key=endpoint.key), "/v1/completions", content=content)
            speed = parse(call_server("GET", server, "/status")).prompt_tokens_per_second
    if speed is None:
        return f"{text}. Computing it takes a while, once"
    seconds = agent.first_tokens / speed
    return f"{text}: about {f'{seconds:.0f} s' if seconds < 100 else f'{seconds / 60:.0f} minutes'} once, then kept"


def _authority_variables(server: KnownServer) -> dict[str, str]:
    """Return the variables by which agents accept the certificate of `server`, besides those that they accept now."""
    if server.authorities is None or not server.url.startswith("https:"):
        return {}
    usual = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile or certifi.where()
    files = usual, os.environ.get("NODE_EXTRA_CA_CERTS"), server.authorities
    whole = state_dir(None).absolute() / "launch" / "authorities.pem"
    found = [text for file in files if file and Path(file) != whole and (text := read_text(Path(file)))]
    write_private(whole, "\n".join(found))
    return dict.fromkeys(("NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE"), str(whole))
