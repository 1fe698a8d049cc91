"""`mtp-coord token`, `node`, `key` and `ca`: who may join and who may ask."""

from __future__ import annotations

import asyncio
import json
import platform
import re
import shlex
import ssl
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import typer

from coordinator.cli.client import call_server, unverified_tls
from coordinator.cli.known_servers import CLIENT, KnownServer
from coordinator.trust.authority import Authority
from coordinator.trust.client_access import ClientAccess, client_proof
from coordinator.trust.keys import MACHINES_KEY, KeyRing, Scope
from coordinator.trust.registry import Registry
from proto.announcement import join_address, parse_address
from proto.errors import AccessError, ProtocolError, UsageError
from proto.state_dir import SERVER_FILE, read_json, write_private
from proto.state_dir import state_dir as directory_of
from proto.terminal.options import StateOption
from proto.trust.certificates import fingerprint, from_pem, to_pem
from proto.trust.joining import JoinToken, new_token, text_of


def open_authority(given: Path | None) -> tuple[Path, Authority]:
    """Return the state directory and its authority. Raises UsageError when there is no cluster yet."""
    state = directory_of(given)
    authority = Authority.open(state)
    if authority is None:
        raise UsageError(
            f"{state} has no cluster yet. Start mtp-coord serve with --listen once, or name the right --state-dir"
        )
    return state, authority


def shown_time(seconds: float) -> str:
    """Return a time in seconds since the epoch as `2026-01-31 12:30 UTC`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


CONNECT_SECONDS = 2.0

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def token(
    action: Annotated[str, typer.Argument(help="create, list or revoke.")],
    token_id: Annotated[str | None, typer.Argument(help="The id of the token to revoke.")] = None,
    ttl: Annotated[str, typer.Option(help="Time of its validity, as in 30m, 1h or 2d.")] = "1h",
    uses: Annotated[int, typer.Option(min=1, max=1000, help="Machines that may join by it.")] = 1,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where machines join.  [default: serve's --listen]"),
    ] = None,
    client: Annotated[
        bool, typer.Option("--client", help="For a client, such as a laptop, instead of a worker.")
    ] = False,
    bare: Annotated[bool, typer.Option("--bare", help="Print the token without the command.")] = False,
    state_dir: StateOption = None,
) -> None:
    """Create, list or revoke the tokens with which machines join the cluster.

    `create` prints the line for the new machine. It has a secret until it is used. `--bare` prints the token alone.
    """
    state, authority = open_authority(state_dir)
    registry = Registry(state)
    match action, token_id:
        case "create", None if client:
            url = read_json(state / MACHINES_KEY).get("url", "")
            if not address and not url:
                raise UsageError(
                    "clients on other machines do not reach the server. Start mtp-coord serve with --host ADDRESS, or "
                    "pass --address"
                )
            url = f"https://{join_address(*parse_address('--address', address))}" if address else url
            line = ClientAccess(state, authority, KeyRing(state), url).invite(_seconds(ttl), uses).command
            typer.echo(line.split()[-1] if bare else line)
        case "create", None:
            given = address and join_address(*parse_address("--address", address))
            where = given or registry.address()
            if not where:
                raise UsageError(
                    "the address where machines join is unknown. Start mtp-coord serve --listen first, or pass "
                    "--address"
                )
            new = new_token(authority.cluster, authority.fingerprint, where)
            registry.add_token(new, _seconds(ttl), uses)
            typer.echo(str(new) if bare else f"mtp-worker --join {new}")
            if not asyncio.run(_listens(where)):
                typer.echo(f"No coordinator listens at {where} now. Start mtp-coord serve with --listen.", err=True)
        case "list", None:
            tokens = registry.tokens().items()
            rows = [(known, str(t["uses"]), shown_time(t["expires"])) for known, t in tokens]
            _print_rows(("token", "uses left", "valid until"), rows)
        case "revoke", str(known):
            registry.revoke_token(known)
            typer.echo(f"revoked {known}")
        case _:
            raise UsageError("mtp-coord token: write token create, token list, or token revoke with an id")


async def _listens(address: str) -> bool:
    """Return whether a program listens at `address`."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(*parse_address("--address", address))
    except OSError:
        return False
    writer.close()
    return True


def _print_rows(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns under a header, or `none` for an empty list."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo(line.rstrip())
    if not rows:
        typer.echo("none")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([smhd])", text.strip())
    if match is None or int(match[1]) == 0:
        raise UsageError(f"--ttl {text!r:.40}: write a time as in 30m, 1h or 2d")
    return float(int(match[1]) * _UNITS[match[2]])


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
            rows = []
            for known in registry.nodes():
                until = "removed" if known.removed else shown_time(known.expires)
                rows.append((known.node_id, known.name, shown_time(known.joined), until))
            _print_rows(("node", "name", "joined", "valid until"), rows)
        case "remove", str(text):
            for removed in registry.remove_nodes(text):
                typer.echo(f"removed {removed.name} ({removed.node_id})")
        case _:
            raise UsageError("mtp-coord node: write node list, or node remove with a name")


FIRST_KEY = (
    "With a first key every client needs one, also programs on this machine. The way back: revoke all keys, and start "
    "mtp-coord serve again without --host."
)


def key(
    action: Annotated[str, typer.Argument(help="create, list or revoke.")],
    name: Annotated[str | None, typer.Argument(help="The name of the key.")] = None,
    scope: Annotated[
        list[Scope] | None,
        typer.Option(help="Kind of calls that it permits; repeatable.  [default: inference]"),
    ] = None,
    state_dir: StateOption = None,
) -> None:
    """Create, list or revoke the API keys of HTTP clients. A running server needs no restart.

    `create` prints the key once. Only its hash is stored.
    """
    ring = KeyRing(directory_of(state_dir))
    match action, name:
        case "create", str(new):
            is_first = not ring.stored_keys()
            if is_first and sys.stdin.isatty() and sys.stdout.isatty():
                typer.confirm(f"{FIRST_KEY} Create it?", abort=True)
                is_first = False
            typer.echo(ring.create(new, frozenset(scope or [Scope.INFERENCE])))
            if is_first:
                typer.echo(FIRST_KEY, err=True)
        case "list", None:
            rows = []
            for known in ring.stored_keys():
                rows.append((known.name, ",".join(sorted(known.scopes)), shown_time(known.created)))
            _print_rows(("key", "scopes", "created"), rows)
        case "revoke", str(known_name):
            ring.revoke(known_name)
            typer.echo(f"revoked {known_name}")
        case _:
            raise UsageError("mtp-coord key: write key create NAME, key list, or key revoke NAME")


def connect(
    token: Annotated[str, typer.Argument(envvar="MTP_JOIN_TOKEN", help="From mtp-coord token create --client.")],
    name: Annotated[str, typer.Option(help="Name of this machine in mtp-coord key list.")] = "",
    state_dir: StateOption = None,
) -> None:
    """Make this machine a client of a cluster. Afterwards status, launch and other commands here find the server.

    The state directory gets the URL, the certificates of the authorities, and an API key of this machine.
    """
    parsed, name = JoinToken.parse(token), name or platform.node().partition(".")[0]
    url, folder = parsed.address, directory_of(state_dir) / CLIENT
    if not url.startswith("https://"):
        raise UsageError(
            "the token is for a worker: mtp-worker --join TOKEN. For a client, run mtp-coord token create --client"
        )
    shown = from_pem(_connect("GET", url, "", unverified_tls())["authorities"])
    trusted = [one for one in shown if fingerprint(one) == parsed.authority]
    if not trusted:
        raise AccessError(f"the server at {url} is not the one of the token. Nothing was sent to it")
    verified = ssl.create_default_context(cadata=to_pem(*trusted))
    fields = {"token_id": parsed.token_id, "proof": client_proof(parsed, name), "name": name}
    found = _connect("POST", url, f"?{urlencode(fields)}", verified)
    write_private(folder / "authorities.pem", found["authorities"])
    write_private(
        folder / "curl",
        f'cacert = "{folder.absolute()}/authorities.pem"\nheader = "Authorization: Bearer {found["api_key"]}"\n'
        'header = "Content-Type: application/json"\n',
    )
    write_private(folder / SERVER_FILE, json.dumps({"url": url, "key": found["api_key"]}))
    typer.echo(
        f"connected to {url}. Here mtp-coord status, launch and bench find it now.\n"
        f"curl:     curl --config {shlex.quote(str(folder.absolute() / 'curl'))} {url}/v1/models\n"
        f"browser:  {url}/ asks for the key in {folder / SERVER_FILE}"
    )


def _connect(method: str, url: str, query: str, tls: ssl.SSLContext) -> dict[str, str]:
    try:
        found = json.loads(call_server(method, KnownServer(url), f"/v1/connect{query}", tls=tls))
    except ValueError:
        raise ProtocolError(f"{url} is no mtp-coord serve of this release") from None
    return {name: text_of(found, name) for name in found}


def ca(action: Annotated[str, typer.Argument(help="rotate.")], state_dir: StateOption = None) -> None:
    """Rotate the certificate authority of the cluster.

    The machines get new certificates, and the old authority stays valid for 30 days.
    """
    if action != "rotate":
        raise UsageError("mtp-coord ca: write ca rotate")
    _, authority = open_authority(state_dir)
    authority.rotate()
    typer.echo(f"new authority, SHA-256 {authority.fingerprint.hex()}")
