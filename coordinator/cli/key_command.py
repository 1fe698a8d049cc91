"""`mtp-coord key`: create, list and revoke the API keys of HTTP clients."""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator.cli.state_option import StateOption, shown_time
from coordinator.trust.key_ring import KeyRing, Scope
from proto.errors import UsageError
from proto.trust import state_dir as state_directory


def key(
    action: Annotated[str, typer.Argument(help="create, list or revoke.")],
    name: Annotated[str | None, typer.Argument(help="The name of the key.")] = None,
    scope: Annotated[
        list[Scope] | None,
        typer.Option(
            help="A kind of calls that the key permits; repeatable.  [default: inference]"
        ),
    ] = None,
    requests_per_minute: Annotated[
        int, typer.Option(min=0, help="Maximum requests per minute; 0 is no limit.")
    ] = 0,
    streams: Annotated[
        int, typer.Option(min=0, help="Maximum requests at the same time; 0 is no limit.")
    ] = 0,
    state_dir: StateOption = None,
) -> None:
    """Create, list or revoke the API keys of HTTP clients. A running server needs no restart.

    `create` prints the key once. Only its hash is stored.
    """
    ring = KeyRing(state_directory.state_dir(state_dir))
    match action, name:
        case "create", str(new):
            scopes = frozenset(scope or [Scope.INFERENCE])
            typer.echo(ring.create(new, scopes, requests_per_minute, streams))
        case "list", None:
            for known in ring.stored_keys():
                scopes_text = ",".join(sorted(known.scopes))
                typer.echo(f"{known.name}  {scopes_text}  created {shown_time(known.created)}")
        case "revoke", str(known_name):
            ring.revoke(known_name)
        case _:
            raise UsageError("mtp-coord key: write key create NAME, key list, or key revoke NAME")
