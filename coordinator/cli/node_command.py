"""`mtp-coord node`: list the machines of the cluster, and remove one."""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator.cli.state_option import StateOption, open_authority, shown_time
from coordinator.trust.registry import Registry
from proto.errors import UsageError


def node(
    action: Annotated[str, typer.Argument(help="list or remove.")],
    name: Annotated[str | None, typer.Argument(help="Name or node id to remove.")] = None,
    state_dir: StateOption = None,
) -> None:
    """List the machines of the cluster, or remove one.

    A removed machine is refused by every other machine within a second. It can join again with a new token.
    """
    state, _ = open_authority(state_dir)
    registry = Registry(state)
    match action, name:
        case "list", None:
            for known in registry.nodes():
                until = "removed" if known.removed else f"valid until {shown_time(known.expires)}"
                typer.echo(
                    f"{known.node_id}  {known.name}  joined {shown_time(known.joined)}  {until}"
                )
        case "remove", str(text):
            for removed in registry.remove_nodes(text):
                typer.echo(f"removed {removed.name} ({removed.node_id})")
        case _:
            raise UsageError("mtp-coord node: write node list, or node remove with a name")
