"""`mtp-coord status`: what a running coordinator says of its cluster, once or as it changes."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from coordinator.cli.http_call import API_KEY, call
from coordinator.status.cluster_status import ClusterStatus, NodeStatus
from proto.errors import ProtocolError
from proto.terminal.size import format_size

REFRESH_SECONDS = 1.0

_COLOURS = {
    "ready": "green",
    "loading": "yellow",
    "idle": "dim",
    "draining": "yellow",
    "refused": "red",
    "lost": "red",
}


def status(
    url: Annotated[
        str, typer.Option(help="Where mtp-coord serve listens.")
    ] = "http://127.0.0.1:8080",
    api_key: Annotated[
        str | None, typer.Option(envvar=API_KEY, help="One of the server's API keys.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and exit; so does a pipe.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and exit.")
    ] = False,
) -> None:
    """Show a live cluster: nodes, spans, memory, health, tokens a second, acceptance. Ctrl-C ends it."""
    if as_json:
        reply = fetch(url, api_key)
        parse(reply)
        typer.echo(reply.decode())
        return
    console = Console(emoji=False)
    if once or not sys.stdout.isatty():
        console.print(render(parse(fetch(url, api_key))))
        return
    with Live(render(parse(fetch(url, api_key))), console=console, screen=False) as live:
        while True:
            time.sleep(REFRESH_SECONDS)
            live.update(render(parse(fetch(url, api_key))))


def fetch(url: str, api_key: str | None) -> bytes:
    """The body of `/status`. Raises what `client.call` does."""
    return call("GET", url, "/status", api_key)


def parse(body: bytes) -> ClusterStatus:
    try:
        return TypeAdapter(ClusterStatus).validate_json(body)
    except ValidationError as error:
        raise ProtocolError(
            f"what answered is not a cluster's status: {error.error_count()} fields are wrong"
        ) from error


def render(cluster: ClusterStatus) -> Group:
    """The cluster as a person reads it: one table of facts, one of nodes."""
    return Group(_facts(cluster), _nodes(cluster.nodes))


def _facts(cluster: ClusterStatus) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    state = "[green]serving[/]" if cluster.ready else "[yellow]not ready[/]"
    detail = f", {escape(cluster.detail)}" if cluster.detail else ""
    table.add_row("cluster", f"{state}, plan {cluster.epoch}{detail}")
    table.add_row("model", escape(cluster.model))
    table.add_row(
        "requests",
        f"{_of(cluster.running, cluster.running_limit)} running, "
        f"{_of(cluster.waiting, cluster.waiting_limit)} waiting",
    )
    table.add_row("K/V tokens", _of(cluster.kv_tokens, cluster.kv_limit))
    table.add_row("tokens/s", f"{cluster.tokens_per_second:.1f}")
    table.add_row("MTP", f"{escape(cluster.mtp)}, acceptance {_acceptance(cluster)}")
    for prompt in cluster.prefilling:
        table.add_row("prefill", f"{escape(prompt.request_id)} {prompt.done}/{prompt.total}")
    idle = [node.name for node in cluster.nodes if node.health == "idle" and not node.detail]
    if idle and cluster.ready:  # else a plan is looked for already
        names = escape(", ".join(idle))
        table.add_row("idle", f"{names}: mtp-coord replan looks for a better plan with all workers")
    return table


def _nodes(nodes: tuple[NodeStatus, ...]) -> Table:
    table = Table(box=SIMPLE, show_edge=False)
    table.add_column("node", overflow="fold")
    for title in ("layers", "health", "memory", "ms a step"):
        table.add_column(title)
    table.add_column("address", no_wrap=True)  # to be typed: whole, however narrow the terminal
    for node in nodes:
        loaded = "" if node.loaded is None else f" {node.loaded:.0%}"
        detail = f": {escape(node.detail)}" if node.detail else ""
        limit = "" if node.memory_limit is None else f" of {format_size(node.memory_limit)}"
        table.add_row(
            escape(node.name),
            node.span or "-",
            f"[{_COLOURS[node.health]}]{node.health}[/]{loaded}{detail}",
            format_size(node.memory_used) + limit,
            "-" if node.stage_ms is None else f"{node.stage_ms:.1f}",
            escape(node.address or "this process"),
        )
    return table


def _of(count: int, limit: int | None) -> str:
    return f"{count:,}" if limit is None else f"{count:,} of {limit:,}"


def _acceptance(cluster: ClusterStatus) -> str:
    """By draft position: 83 / 65 / 49 %."""
    rates = cluster.acceptance_by_position
    if not any(rate is not None for rate in rates):
        return "not known yet"
    return " / ".join("-" if rate is None else f"{rate * 100:.0f}" for rate in rates) + " %"
