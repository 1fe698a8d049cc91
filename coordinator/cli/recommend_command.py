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
from coordinator.planning.recommend import USABLE_SPEED, joined_spec, recommendations
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
    """List the published models that fit your Macs, the largest first, each with its best plan. One is recommended.

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
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("name", no_wrap=True)
    for title in ("memory", "download", "context", "tokens/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("flags", no_wrap=True)
    for one in found:
        speed = f"{one.plain:.3g}" + (f"; {one.drafted:.3g}" if one.head is not None else "")
        sizes, context = map(format_size, (one.nbytes, one.download)), f"{one.context // 1024}k"
        table.add_row("*" * one.best, one.name, *sizes, context, speed, one.flags)
    console.print(table)
    best = next((one for one in found if one.best), None)
    if best is None:
        console.print("None fits. Add a machine.")
        return
    own = " --own-worker" * (best.machines > 1)
    line = f"mtp-coord serve {best.name} {best.flags}{own}"
    console.print(f"\n* [bold]{line}[/bold]", highlight=False, soft_wrap=True)
    reason = f"the largest with {USABLE_SPEED:g} tokens/s and room for agents" if best.usable else "the fastest"
    console.print(f"It is {reason}. memory: of the weights, over all Macs. context: tokens that have room.")
    console.print("tokens/s: of one answer, plain; with drafts of its MTP head.")
    if len(specs) > 1 and any(one.machines == 1 for one in found):
        console.print(
            "--single-node: one Mac is faster here, or as fast. More add room, and serve more answers at once."
        )
    if any(one.head is False for one in found):
        console.print("mtp-coord pull NAME downloads one, with the head that some repos lack.")


def _joined(url: str) -> list[NodeSpec]:
    """Return the machines of the server at `url`. Raises UsageError without one."""
    try:
        cluster = parse(fetch(url, None))
    except ClusterError as error:
        raise UsageError(f"name your Macs, as in --mac 'M4 Pro 64GB' ({error})") from error
    specs = []
    for node in cluster.nodes:
        if node.memory_limit and node.health != "refused":
            machine = (node.name, node.memory_limit, node.bytes_per_second, node.chip)
            specs.append(joined_spec(*machine))
    if not specs:
        raise UsageError(f"no machine has joined {url or 'the server'}. Name your Macs, as in --mac 'M4 Pro 64GB'")
    return specs
