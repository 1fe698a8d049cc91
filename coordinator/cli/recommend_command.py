"""`mtp-coord recommend`: the published models that fit some Macs, before any download."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from coordinator.cli.cluster_commands import fetch, parse
from coordinator.planning.chips import mac_specs
from coordinator.planning.plan import NodeSpec
from coordinator.planning.recommend import joined_spec, recommendations
from proto.errors import ClusterError, UsageError
from proto.terminal.options import JsonOption
from proto.terminal.progress import format_size


def recommend(
    mac: Annotated[
        list[str] | None,
        typer.Option(metavar="'M4 Pro 64GB'", help="A Mac by its chip and memory; repeatable."),
    ] = None,
    url: Annotated[str, typer.Option(help="URL of mtp-coord serve, whose machines are taken without --mac.")] = "",
    as_json: JsonOption = False,
) -> None:
    """List the published models that fit your Macs, the largest first, with their predicted speed.

    Without --mac the machines are those of the running server. Speeds are within a third of what people measured.
    `mtp-coord recommend --mac "M4 Pro 64GB" --mac "M4 Pro 64GB"`
    """
    specs = mac_specs(mac) if mac else _joined(url)
    found = recommendations(specs)
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    console = Console(emoji=False)
    console.print(f"On {', '.join(spec.name for spec in specs)}:", highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for title in ("size", "context", "tokens/s", "drafting", "Macs", "head"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        speeds = f"{one.plain:.3g}", "-" if one.head is None else f"{one.drafted:.3g}"
        size, head = format_size(one.nbytes), {True: "included", False: "fetched", None: "none"}[one.head]
        context = f"{one.context // 1024}k"
        table.add_row(one.name, size, context, *speeds, str(one.machines), head)
    console.print(table)
    if not found:
        console.print("None fits. Add a machine.")
    else:
        console.print("context: tokens that have room. tokens/s: of one answer, plain and drafting.")
        console.print("Macs: those with which one answer is fastest. More add room, and serve more answers at once.")
        console.print("mtp-coord pull NAME downloads one, and mtp-coord serve NAME serves it.")


def _joined(url: str) -> list[NodeSpec]:
    """Return the machines of the server at `url`. Raises UsageError without one."""
    try:
        cluster = parse(fetch(url, None))
    except ClusterError as error:
        raise UsageError(f"name your Macs, as in --mac 'M4 Pro 64GB' ({error})") from error
    specs = []
    for node in cluster.nodes:
        if node.memory_limit:
            machine = (node.name, node.memory_limit, node.bytes_per_second, node.chip)
            specs.append(joined_spec(*machine))
    if not specs:
        raise UsageError(f"no machine has joined {url or 'the server'}. Name your Macs, as in --mac 'M4 Pro 64GB'")
    return specs
