"""The checks of what a worker reports about itself and about its hop."""

from __future__ import annotations

import math
from typing import Any

import pytest

from coordinator.cluster.membership import MAX_NAME, report_problem, shown_name
from coordinator.pipeline.worker_client import reported_hop
from proto import cluster_pb2 as pb
from proto.rpc.data_connection import HopFigures


def test_a_reported_hop_is_kept() -> None:
    """Time and speed arrive; a speed may be unknown."""
    reply = pb.ConnectReply(link_us=250.0, link_bytes_per_second=1e9)
    assert reported_hop(reply) == HopFigures(250e-6, 1e9)
    assert reported_hop(pb.ConnectReply(link_us=100.0)) == HopFigures(1e-4, 0.0)


@pytest.mark.parametrize(
    ("microseconds", "speed"),
    [(0.0, 0.0), (math.nan, 1.0), (math.inf, 1.0), (-1.0, 1.0), (1.0, math.inf), (1.0, math.nan)],
)
def test_invalid_figures_are_left_out(microseconds: float, speed: float) -> None:
    """Figures that JSON or the planner cannot use are no figures."""
    reply = pb.ConnectReply(link_us=microseconds, link_bytes_per_second=speed)
    assert reported_hop(reply) is None


LAYERS = 8


def report(**changes: Any) -> pb.WorkerInfo:
    """Return the report of an honest worker for a model of LAYERS layers, with `changes`."""
    hardware: dict[str, Any] = {"bytes_per_second": 1e11, "memory_limit": 2**34}
    hardware |= {name: changes.pop(name) for name in hardware if name in changes}
    info = pb.WorkerInfo(worker_id="w" * 16, name="mac", hardware=pb.Hardware(**hardware))
    for name, value in changes.items():
        if name == "pinned":
            start, end = value
            info.pinned.CopyFrom(pb.Span(start=start, end=end))
        else:
            setattr(info, name, value)
    return info


@pytest.mark.parametrize("pinned", [None, (0, LAYERS), (3, 4)])
def test_an_honest_report_has_no_problem(pinned: tuple[int, int] | None) -> None:
    """The largest allowed memory is no problem either, nor is an unknown speed."""
    changes: dict[str, Any] = {} if pinned is None else {"pinned": pinned}
    assert report_problem(report(**changes), LAYERS) == ""
    assert report_problem(report(memory_limit=2**50, bytes_per_second=0.0, **changes), LAYERS) == ""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"worker_id": ""}, "invalid worker id"),
        ({"worker_id": "w" * 129}, "invalid worker id"),
        ({"worker_id": "w\x1b[2J"}, "invalid worker id"),
        ({"bytes_per_second": math.nan}, "invalid speed of nan"),
        ({"bytes_per_second": math.inf}, "invalid speed of inf"),
        ({"bytes_per_second": -1.0}, "invalid speed of -1"),
        ({"bytes_per_second": 1e16}, "invalid speed of 1e+16"),
        ({"memory_limit": 0}, "invalid memory limit of 0"),
        ({"memory_limit": 2**50 + 1}, "invalid memory limit of 1125899906842625"),
        ({"memory_limit": 2**63}, "invalid memory limit of 9223372036854775808"),
        ({"pinned": (7, 2)}, "pins the layers 7 to 2"),
        ({"pinned": (3, 3)}, "pins the layers 3 to 3"),
        ({"pinned": (0, LAYERS + 1)}, "pinned to layers 0-8, and the model has 8"),
    ],
)
def test_an_impossible_report_is_refused(changes: dict[str, Any], problem: str) -> None:
    """The reason names the value."""
    assert problem in report_problem(report(**changes), LAYERS)


def test_names_are_shown_in_one_short_line() -> None:
    """Control characters cannot reach a terminal, and a worker without a name has its address."""
    shown = shown_name(report(name="\x1b[31mred\n" + "n" * 10**6), "10.0.0.1:7100")
    assert len(shown) <= MAX_NAME
    assert shown.isprintable()
    assert shown_name(report(name=""), "10.0.0.1:7100") == "10.0.0.1:7100"
