"""`mtp-coord status`, `load` and `trace`: questions to a running coordinator."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from coordinator.cli.client import KeyOption, UrlOption, call
from coordinator.status.cluster_status import ClusterStatus, LoadReport, NodeStatus
from proto.errors import DeadlineError, NotReadyError, ProtocolError, UsageError
from proto.terminal.options import JsonOption
from proto.terminal.progress import byte_bar, format_size

_COLOURS = {"ready": "green", "loading": "yellow", "idle": "dim", "draining": "yellow", "refused": "red", "lost": "red"}


def status(url: UrlOption = "", api_key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Show a cluster: nodes, layers, memory, health, tokens a second, acceptance. The page shows it live.

    **Health** of a node: `ready` runs its layers; `loading` reads them; `idle` is not in the plan and keeps
    loaded layers for the next one; `draining` is leaving; `refused` cannot serve; `lost` does not answer.

    **layers** are inclusive, as in 0-31. **ms a step** is the time of one decode step of that stage. **plan** counts
    the plans since the start. **recoveries** counts plans that failed while serving. **acceptance** is the
    accepted share of the drafts at each position.
    """
    reply = fetch(url, api_key)
    cluster = parse(reply)
    if as_json:
        typer.echo(reply.decode())
    else:
        Console(emoji=False).print(render(cluster))


def fetch(url: str, api_key: str | None) -> bytes:
    """Return the body of `/status`. Raises the errors of `call`."""
    return call("GET", url, "/status", api_key)


def parse(body: bytes) -> ClusterStatus:
    """Return the status in the body of an answer. Raises ProtocolError."""
    try:
        return TypeAdapter(ClusterStatus).validate_json(body)
    except ValidationError as error:
        raise ProtocolError(
            f"the answer is not the status of a cluster: {error.error_count()} fields are wrong. "
            "Give the --url of an mtp-coord serve of this release"
        ) from error


def render(cluster: ClusterStatus) -> Group:
    """Return the cluster for a terminal: a table of facts, a table of nodes, and the reasons of their health."""
    reasons = [Text(f"{node.name}: {node.detail}") for node in cluster.nodes if node.detail]
    return Group(_facts(cluster), _nodes(cluster.nodes), *reasons)


def _facts(cluster: ClusterStatus) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    state = "[green]serving[/]" if cluster.ready else "[yellow]not ready[/]"
    since = f" for {duration(cluster.phase_seconds)}" if cluster.phase_seconds else ""
    detail = f", {escape(cluster.detail)}" if cluster.detail else ""
    table.add_row("cluster", f"{state}{since}, plan {cluster.epoch}{detail}")
    recoveries = f"{cluster.recoveries} recover{'y' if cluster.recoveries == 1 else 'ies'}"
    table.add_row("server", f"up for {duration(cluster.uptime_seconds)}, {recoveries}")
    table.add_row("model", escape(cluster.model))
    running = _of(cluster.running, cluster.running_limit)
    waiting = _of(cluster.waiting, cluster.waiting_limit)
    table.add_row("requests", f"{running} running, {waiting} waiting")
    table.add_row("K/V tokens", _of(cluster.kv_tokens, cluster.kv_limit))
    table.add_row("tokens/s", f"{cluster.tokens_per_second:.1f}")
    table.add_row("MTP", f"{escape(cluster.mtp)}, {_acceptance(cluster)}")
    for prompt in cluster.prefilling:
        left = prompt.seconds_left
        expected = "" if left is None or left < 1 else f", about {duration(left)} left"
        progress = f"{prompt.done}/{prompt.total}{expected}"
        table.add_row("prefill", f"{escape(prompt.request_id)} {progress}")
    idle = [node.name for node in cluster.nodes if node.health == "idle" and not node.detail]
    if idle and cluster.ready:  # otherwise the server looks for a plan anyway
        names = escape(", ".join(idle))
        table.add_row("idle", f"{names}: used once no answer is open, if a plan is better with them")
    if cluster.rounding:
        table.add_row("rounding", escape(cluster.rounding))
    return table


def duration(seconds: float) -> str:
    """Return a time for people: `12 s`, `3 min`, `5 h`, `2 days`."""
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def _nodes(nodes: tuple[NodeStatus, ...]) -> Table:
    table = Table(box=SIMPLE, show_edge=False)
    table.add_column("node", overflow="fold")
    for title in ("layers", "health", "memory", "ms a step"):
        table.add_column(title)
    table.add_column("address", no_wrap=True)  # users copy it
    for node in nodes:
        loaded = "" if node.loaded is None else f" {node.loaded:.0%}"
        limit = f" of {format_size(node.memory_limit)}" if node.memory_limit else ""
        name, address = escape(node.name), escape(node.address or "this process")
        health = f"[{_COLOURS[node.health]}]{node.health}[/]{loaded}"
        memory = format_size(node.memory_used) + limit if node.memory_used or limit else "-"
        step = "-" if node.stage_ms is None else f"{node.stage_ms:.1f}"
        table.add_row(name, node.span or "-", health, memory, step, address)
    return table


def _of(count: int, limit: int | None) -> str:
    return f"{count:,}" if limit is None else f"{count:,} of {limit:,}"


def _acceptance(cluster: ClusterStatus) -> str:
    """Return the accepted shares, such as `66 % of the head's drafts (83, 65, 49 by position), 90 % of the text's`."""
    drafted, accepted = cluster.drafted_by_position, cluster.accepted_by_position
    if not any(drafted) and not cluster.ngram_drafted:
        return "no drafts yet"
    shares = []
    if any(drafted):
        pairs = zip(drafted, accepted, strict=True)
        rates = ", ".join(f"{kept / n * 100:.0f}" if n else "-" for n, kept in pairs)
        mean = sum(accepted) / sum(drafted)
        shares.append(f"{mean:.0%} of the head's drafts accepted ({rates} by position)")
    if cluster.ngram_drafted:
        shares.append(f"{cluster.ngram_accepted / cluster.ngram_drafted:.0%} of the text's")
    return ", ".join(shares)


POLL_SECONDS = 0.25
"""Seconds between two requests for the progress."""

LOAD_SECONDS = 3600.0
"""Seconds. Longest wait for a model, which may be downloaded."""

PATH = "/v1/models/load"


def load(
    model: Annotated[str, typer.Argument(help="A model that mtp-coord models lists, a hub repo, or a directory.")],
    url: UrlOption = "",
    api_key: KeyOption = None,
) -> None:
    """Serve another model without a restart. The key needs the scope admin.

    The present model serves until the files of the new one are there, and its open answers have a minute to finish. If
    the new model cannot be loaded, the present one is loaded again.
    """
    if model.startswith(".") or (Path(model) / "config.json").is_file():
        model = str(Path(model).absolute())
    report = LoadReport(**json.loads(call("POST", url, PATH, api_key, content={"model": model})))
    deadline = time.monotonic() + LOAD_SECONDS
    with byte_bar(f"loading {model}") as show:
        while report.running and time.monotonic() < deadline:
            show(report.done, report.total)
            time.sleep(POLL_SECONDS)
            report = LoadReport(**json.loads(call("GET", url, PATH, api_key)))
    if report.phase == "failed":
        raise NotReadyError(f"the model was not changed: {report.error}")
    if report.running:
        raise DeadlineError(f"no result after {LOAD_SECONDS:g} s. The server continues it")
    typer.echo(f"{report.model} serves")


TRACE_SECONDS = 30.0
"""Seconds. Deadline of the call: the coordinator collects the times of all workers first."""


def trace(
    url: UrlOption = "",
    api_key: KeyOption = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Last seconds to show.")] = 5.0,
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("trace.json"),
) -> None:
    """Write the path of every frame of the last seconds to a file.

    Open the file at https://ui.perfetto.dev or chrome://tracing. A table of the median times goes to stdout.
    """
    path = f"/trace?seconds={seconds:g}"
    body = call("GET", url, path, api_key, deadline=TRACE_SECONDS)
    try:
        found = json.loads(body)
        table, events = found["table"], found["trace"]
    except (ValueError, KeyError, TypeError):
        raise ProtocolError("the server did not answer with a trace") from None
    try:
        output.write_text(json.dumps(events))
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}") from error
    if len(table.splitlines()) < 2:  # a header only
        typer.echo("the server has computed nothing since its plan began. Send a request first")
        return
    typer.echo(table)
    typer.echo(f"\n{len(events['traceEvents'])} events in {output}. Open it at ui.perfetto.dev")
