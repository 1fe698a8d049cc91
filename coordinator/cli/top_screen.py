"""The screen of `mtp-coord top`, drawn from a `LiveView`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from coordinator.cli.live_view import LiveView
from coordinator.status.bottleneck import UNBALANCED
from proto.terminal.size import format_size

SHARE_SECONDS = 3.0
"""Seconds. Period of the shares of time computed: long enough for a steady figure."""

BARS = "▁▂▃▄▅▆▇█"
BAR_CELLS = 12
HEALTH_STYLES = {
    "ready": "green",
    "loading": "yellow",
    "draining": "yellow",
    "lost": "red",
    "refused": "red",
}
SHOWN_EVENTS = 5

Json = dict[str, Any]


def render_top(view: LiveView, width: int) -> RenderableType:
    """Return the whole screen for a terminal of `width` columns."""
    status = view.status
    return Group(
        _headline(status),
        Text(),
        _figures(view, width),
        Text(),
        _layers(status, width),
        _machines(view),
        Text(status.get("suggestion") or "", style="bold"),
        Text(),
        *_events(view),
    )


def _headline(status: Json) -> Text:
    style = "green" if status["ready"] else "yellow"
    return Text.assemble(
        ("● ", style), (status["activity"], "bold"), f"   {status['model']}, plan {status['epoch']}"
    )


def _figures(view: LiveView, width: int) -> Table:
    status = view.status
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    cells = max(10, width - 36)
    rates = [sample[1] for sample in view.history]
    table.add_row("tokens/s", f"{status['tokens_per_second']:.1f}", sparkline(rates, cells))
    drafted, accepted = status["drafted_by_position"], status["accepted_by_position"]
    by_position = " / ".join(
        f"{a / d:.0%}" if d else "-" for d, a in zip(drafted, accepted, strict=True)
    )
    wasted = view.wasted_share()
    lost = "" if wasted is None else f", {wasted:.0%} of the rows rejected"
    table.add_row("acceptance", status["mtp"], f"{by_position or 'no drafts yet'}{lost}")
    first = view.history[-1][5] if view.history else None
    table.add_row("first token", "-" if first is None else f"{first:.2f} s", "median of 10 minutes")
    waiting = f"{status['waiting']} queued"
    table.add_row("requests", str(status["running"]), waiting)
    table.add_row("K/V tokens", f"{status['kv_tokens']:,}", _of(status["kv_limit"]))
    return table


def _of(limit: int | None) -> str:
    return "" if limit is None else f"of {limit:,}"


def _layers(status: Json, width: int) -> Text:
    """Return the layers as one line: a block for attention, a shade for GDN, cut at the stages."""
    model = status["architecture"]
    if not model or len(model["layers"]) + 2 * len(status["nodes"]) + 6 > width:
        return Text()
    starts = {int(node["span"].partition("-")[0]) for node in status["nodes"] if node["span"]}
    line = Text("layers  ", style="dim")
    for layer, kind in enumerate(model["layers"]):
        line.append(" │ " if layer in starts and layer else "")
        line.append("█" if kind == "a" else "▒", style="blue")
    if model["has_head"]:
        line.append(" ◇", style="blue")
    return line


def _machines(view: LiveView) -> Table:
    shares = view.computed_shares(SHARE_SECONDS)
    nodes: Sequence[Json] = view.status["nodes"]
    slowest = _slowest(nodes)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in (
        "machine",
        "layers",
        "health",
        "ms a step",
        "computes",
        "",
        "memory",
        "link",
        "detail",
    ):
        table.add_column(title, overflow="fold")
    stage = 0
    for node in nodes:
        share = None
        if node["span"]:
            share = shares[stage] if stage < len(shares) else None
            stage += 1
        slow = slowest is not None and node["stage_ms"] == slowest
        table.add_row(
            escape(node["name"]),
            node["span"] or "-",
            f"[{HEALTH_STYLES.get(node['health'], 'dim')}]{node['health']}[/]",
            "-" if node["stage_ms"] is None else f"{node['stage_ms']:.1f}{' ◀' if slow else ''}",
            "-" if share is None else f"{share:.0%}",
            "" if share is None else bar(share),
            format_size(node["memory_used"]),
            escape(_link(node)),
            escape(_detail(node)),
        )
    return table


def _slowest(nodes: Sequence[Json]) -> float | None:
    """Return the time of the slowest stage, or None where all take about as long."""
    times = [node["stage_ms"] for node in nodes if node["span"] and node["stage_ms"]]
    if len(times) < 2 or max(times) * len(times) < UNBALANCED * sum(times):
        return None
    return float(max(times))


def _link(node: Json) -> str:
    """Return kind, time and speed of the node's hop, as far as they are known."""
    parts = [node["link_kind"]]
    if node["link_ms"] is not None:
        parts.append(f"{node['link_ms']:.2f} ms")
    if node["link_bytes_per_second"]:
        parts.append(f"{format_size(node['link_bytes_per_second'])}/s")
    return " ".join(filter(None, parts))


def _detail(node: Json) -> str:
    if node["health"] == "loading" and node["load_bytes"]:
        return f"{format_size(node['loaded_bytes'])} of {format_size(node['load_bytes'])}"
    return str(node["detail"])


def _events(view: LiveView) -> Iterable[Text]:
    for event in list(view.events)[-SHOWN_EVENTS:]:
        at = datetime.fromtimestamp(event["at"]).astimezone().strftime("%H:%M:%S")
        after = "" if event["seconds"] is None else f" after {event['seconds']:.1f} s"
        yield Text.assemble((f"{at}  ", "dim"), event["text"], after)


def sparkline(values: Sequence[float], cells: int) -> str:
    """Return the last `cells` values as bars, relative to the largest."""
    shown = values[-cells:]
    top = max(shown, default=0.0)
    if top <= 0:
        return ""
    return "".join(BARS[min(len(BARS) - 1, int(value / top * len(BARS)))] for value in shown)


def bar(share: float) -> str:
    """Return a share from 0 to 1 as a bar of BAR_CELLS cells."""
    full = round(share * BAR_CELLS)
    return "█" * full + "░" * (BAR_CELLS - full)
