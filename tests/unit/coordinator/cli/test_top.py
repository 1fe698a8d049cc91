"""`mtp-coord top`: the state made of events, and its screen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from coordinator.cli.live_view import LiveView, parse_events
from coordinator.cli.top_screen import bar, render_top, sparkline
from coordinator.status.cluster_status import ClusterStatus, ModelStatus, NodeStatus
from coordinator.web.live_feed import status_fields
from proto.errors import ProtocolError

NODES = (
    NodeStatus("mac-[red]", "10.0.0.1:1", "0-3", "ready", stage_ms=10.0),
    NodeStatus("mac-2", "10.0.0.2:1", "4-7", "ready", stage_ms=20.0),
    NodeStatus("mac-3", "10.0.0.3:1", health="lost", detail="silent for 3 s"),
)
STATUS = ClusterStatus(
    ready=True,
    model="tiny",
    nodes=NODES,
    running=1,
    drafted_by_position=(10, 8),
    accepted_by_position=(8, 4),
    architecture=ModelStatus("gggaggga", has_head=True, context=4096),
)
FRAMES: list[list[Any]] = [
    [1, "w", 3, 1, 100.0, 30.0, 1.0, 10.0, 12.0, 15.0],
    [2, "p", 64, 0, 100.97, 30.0, 1.0, 10.0, 12.0, 15.0],
]


def view_of(status: ClusterStatus) -> LiveView:
    """Return a view after one snapshot."""
    view = LiveView()
    event = {"at": 0.0, "kind": "lost", "text": "mac-3 was lost", "seconds": None}
    view.apply("snapshot", {"status": status_fields(status), "events": [event], "frames": FRAMES})
    return view


def shown(view: LiveView, width: int = 120) -> str:
    """Return the screen as text."""
    console = Console(width=width, record=True, file=None, emoji=False)
    with console.capture() as capture:
        console.print(render_top(view, width))
    return capture.get()


def test_the_screen_shows_the_cluster() -> None:
    """Stages with the slow one marked, layers cut at the stages, acceptance, the lost machine and why."""
    text = shown(view_of(STATUS))
    for part in (
        *("Generating 1 answer", "tiny", "80% / 50%", "1% of the rows rejected"),
        *("mac-[red]", "0-3", "10.0", "20.0 ◀", "lost", "silent for 3 s", "mac-3 was lost"),
        *("▒▒▒█ │ ▒▒▒█ ◇", "mac-2 sets the pace"),
    ):
        assert part in text, text


def test_balanced_stages_have_no_mark() -> None:
    """A small difference is noise."""
    nodes = (NODES[0], replace(NODES[1], stage_ms=10.5))
    assert "◀" not in shown(view_of(replace(STATUS, nodes=nodes)))


def test_a_server_without_a_plan_has_a_screen() -> None:
    """No field of the plan is needed."""
    assert "Waiting for workers" in shown(
        view_of(ClusterStatus(False, "tiny", detail="waiting for workers")), width=80
    )


def test_deltas_change_the_snapshot() -> None:
    """Lists grow, and the status changes field by field."""
    view = view_of(STATUS)
    view.apply("delta", {"status": {"running": 4}, "history": [[1.0, 5.0]], "frames": [FRAMES[1]]})
    assert view.status["running"] == 4
    assert view.status["model"] == "tiny"
    assert (len(view.history), len(view.frames)) == (1, 3)
    assert view.computed_shares(0.5) == [pytest.approx(0.04), pytest.approx(0.06)]
    with pytest.raises(ProtocolError):
        LiveView().apply("delta", {})


def test_events_are_read_and_other_answers_refused() -> None:
    """Comments keep a connection alive and mean nothing."""
    lines = ["event: snapshot", 'data: {"a": 1}', "", ": keep-alive", ""]
    assert list(parse_events(lines)) == [("snapshot", {"a": 1})]
    for wrong in ("<html>", "data: {"):
        with pytest.raises(ProtocolError):
            list(parse_events([wrong]))


def test_bars_are_relative() -> None:
    """The largest value is a full bar; nothing is drawn without values."""
    assert sparkline([0.0, 5.0, 10.0], 2) == "▅█"
    assert sparkline([], 5) == sparkline([0.0], 5) == ""
    assert bar(0.5) == "██████░░░░░░"
