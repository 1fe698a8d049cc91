"""Tests of the frame log."""

from __future__ import annotations

import logging

import pytest

from coordinator.generation.frame_log import log_frame
from proto.frame import Admit, Commit, DropPrefix, Frame
from proto.segment import Outcome, Segment

FRAME = Frame(
    epoch=2,
    number=17,
    ops=(Admit(3, 100, 20), Commit(1, 4, 2), DropPrefix(7)),
    segments=(
        Segment(3, 0, 0, (5,) * 20, sample=True),
        Segment(1, 5, 140, (8, 9, 10), open=True, sample=True, drafts=2),
        Segment(4, 6, 30, (8, 9), open=True, cancelled=True),
    ),
    outcomes=(
        Outcome(3, 0, 20, token=1),
        Outcome(1, 5, 2, token=8881, drafts=(8882, 8883)),
        Outcome(4, 6, 0, cancelled=True),
    ),
    stage_us=(22_400, 6_420),
)


def test_a_frame_is_one_debug_record(caplog: pytest.LogCaptureFixture) -> None:
    """A record holds operations, segments, accepted lengths and stage times, and no token."""
    with caplog.at_level(logging.DEBUG, "coordinator.generation.frame_log"):
        log_frame(FRAME)
    (record,) = caplog.records
    fields = vars(record)
    ours = fields.keys() - vars(logging.makeLogRecord({})).keys()
    assert (record.message, fields["epoch"], fields["number"], fields["rows"]) == (
        "frame",
        2,
        17,
        23,
    )
    assert fields["stage_ms"] == "22.4+6.4"
    assert fields["ops"] == "admit 3, commit 1, drop 7"
    assert (
        fields["segments"]
        == "3.0@0 prompt 20 sampled, 1.5@140 accepted 2/3 drafts 2, 4.6@30 invalidated"
    )
    assert "888" not in str([fields[name] for name in ours])


def test_nothing_is_written_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    """A server that logs above debug level builds no record."""
    with caplog.at_level(logging.INFO, "coordinator.generation.frame_log"):
        log_frame(FRAME)
    assert caplog.records == []
