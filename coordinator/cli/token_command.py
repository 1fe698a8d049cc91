"""`mtp-coord token`: create, list and revoke the tokens with which machines join."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from coordinator.cli.state_option import StateOption, open_authority, shown_time
from coordinator.trust.registry import Registry
from proto.address import join_address, parse_address
from proto.errors import UsageError
from proto.trust.join_token import new_token

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def token(
    action: Annotated[str, typer.Argument(help="create, list or revoke.")],
    token_id: Annotated[str | None, typer.Argument(help="The id of the token to revoke.")] = None,
    ttl: Annotated[
        str, typer.Option(help="Time for which it is valid, as in 30m, 1h or 2d.")
    ] = "1h",
    uses: Annotated[int, typer.Option(min=1, max=1000, help="Machines that may join by it.")] = 1,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where machines join.  [default: serve's --listen]"),
    ] = None,
    state_dir: StateOption = None,
) -> None:
    """Create, list or revoke the tokens with which machines join the cluster.

    `create` prints one line: pass it to `mtp-worker --join` on the new machine. It is a secret until it is used.
    """
    state, authority = open_authority(state_dir)
    registry = Registry(state)
    match action, token_id:
        case "create", None:
            where = (
                join_address(*parse_address("--address", address))
                if address
                else registry.address()
            )
            if not where:
                raise UsageError(
                    "the address where machines join is unknown. Start mtp-coord serve --listen first, or pass "
                    "--address"
                )
            new = new_token(authority.cluster, authority.fingerprint, where)
            registry.add_token(new, _seconds(ttl), uses)
            typer.echo(str(new))
        case "list", None:
            for known, facts in registry.tokens().items():
                until = shown_time(facts["expires"])
                typer.echo(f"{known}  {facts['uses']} uses left  valid until {until}")
        case "revoke", str(known):
            registry.revoke_token(known)
        case _:
            raise UsageError(
                "mtp-coord token: write token create, token list, or token revoke with an id"
            )


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([smhd])", text.strip())
    if match is None or int(match[1]) == 0:
        raise UsageError(f"--ttl {text!r:.40}: write a time as in 30m, 1h or 2d")
    return float(int(match[1]) * _UNITS[match[2]])
