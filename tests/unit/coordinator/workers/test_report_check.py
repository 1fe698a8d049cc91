"""The check of what a worker reports about its hop."""

from __future__ import annotations

import math

import pytest

from coordinator.workers.report_check import reported_hop
from proto import cluster_pb2 as pb
from proto.rpc.hop_probe import HopFigures


def test_a_reported_hop_is_kept() -> None:
    """Time, speed and kind arrive, without control characters."""
    reply = pb.ConnectReply(link_us=250.0, link_bytes_per_second=1e9, link_kind="Wi\x1b-Fi")
    found = reported_hop(reply)
    assert found is not None
    assert (found.seconds, found.bytes_per_second) == (250e-6, 1e9)
    assert "\x1b" not in found.kind
    assert reported_hop(pb.ConnectReply(link_us=100.0)) == HopFigures(1e-4, 0.0, "")


@pytest.mark.parametrize(
    ("microseconds", "speed"),
    [(0.0, 0.0), (math.nan, 1.0), (math.inf, 1.0), (-1.0, 1.0), (1.0, math.inf), (1.0, math.nan)],
)
def test_invalid_figures_are_left_out(microseconds: float, speed: float) -> None:
    """Figures that JSON or the planner cannot use are no figures."""
    reply = pb.ConnectReply(link_us=microseconds, link_bytes_per_second=speed)
    assert reported_hop(reply) is None
