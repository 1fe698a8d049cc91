"""A pipeline whose stages are groups, and the detector that tells lost frames from a computing or idle pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from coordinator.pipeline.remote_pipeline import RemotePipeline, StallDetector, _check_outcomes
from coordinator.planning.capacity import Capacity
from coordinator.schedule.backups import Backup
from proto.backup import LayerState, ReceivedStates, by_layer
from proto.control import Rollback
from proto.errors import ProtocolError
from proto.frame import Frame, Outcome, Segment
from proto.span import Span

ROOM = Capacity(sequences=1, kv_tokens=1, prefix_bytes=0)


@dataclass
class Member:
    """The client of a member that holds a share of two layers: keys and values, and a state."""

    rank: int
    first: int
    written: list[LayerState] = field(default_factory=list)

    async def read_backup(self, epoch: int, seq_id: int, limit: int) -> ReceivedStates:
        """Return the member's shares."""
        data = bytes([self.rank])
        pair = enumerate((True, False), self.first)
        states = [LayerState(n, appends, data, self.rank, 2) for n, appends in pair]
        return ReceivedStates(7, states, 0.1)

    async def write_backup(self, epoch: int, seq_id: int, tokens: Sequence[int], states: Iterable[LayerState]) -> None:
        """Keep what the coordinator writes."""
        self.written += states


async def test_a_backup_has_the_shares_of_all_members() -> None:
    """Two backups of two groups: keys and values continue, the newest state stays, and each member gets all shares."""
    members = [[Member(rank, first) for rank in range(2)] for first in (0, 2)]
    pipeline = RemotePipeline(cast(Any, members), 1, ROOM, 3.0, [Span(0, 2), Span(2, 4)])
    backup = Backup()
    for _ in range(2):
        found = await pipeline.read_backup(0, 100)
        backup.add_states(found.tokens, found.states)
    both = (b"\x00", b"\x01")
    assert by_layer(backup.states) == {0: [both] * 2, 1: [both], 2: [both] * 2, 3: [both]}
    await pipeline.write_backup(0, (1, 2), backup.states)
    for stage, group in enumerate(members):
        for member in group:
            assert {state.layer for state in member.written} == {2 * stage, 2 * stage + 1}
            assert len(member.written) == 6


async def test_a_rollback_is_a_signal_to_every_stage() -> None:
    """The first worker of each stage gets it, and the other members of its group follow the first one's frames."""
    members = [[MagicMock() for _ in range(2)] for _ in range(2)]
    pipeline = RemotePipeline(members, 3, ROOM, 3.0, [Span(0, 2), Span(2, 4)])
    rollback = Rollback(1, 5, 2)
    pipeline.broadcast_rollback(rollback)
    for first, second in members:
        first.send_signal.assert_called_once_with(rollback.to_signal(3))
        second.send_signal.assert_not_called()


SAMPLED = Segment(1, 0, 0, (5,), open=True, sample=True)


def test_an_outcome_without_a_token_is_a_protocol_error() -> None:
    """A segment that asked for a token gets one, unless its window was invalidated."""
    with pytest.raises(ProtocolError, match="no token for sequence 1"):
        _check_outcomes(Frame(1, 0, segments=(SAMPLED,), outcomes=(Outcome(1, 0, 1),)))
    _check_outcomes(Frame(1, 0, segments=(SAMPLED,), outcomes=(Outcome(1, 0, 1, token=7),)))
    _check_outcomes(Frame(1, 0, segments=(SAMPLED,), outcomes=(Outcome(1, 0, 0),)))


def record_stages(progress: StallDetector, *frames: int, now: float, busy_us: int = 0) -> None:
    """Record a report of every stage with its number of frames."""
    for stage, count in enumerate(frames):
        progress.record_stage(stage, count, busy_us, writing=False, now=now)


def test_an_idle_pipeline_is_never_stalled() -> None:
    """An idle pipeline is never stalled."""
    progress = StallDetector(2)
    record_stages(progress, 0, 0, now=0.0)
    record_stages(progress, 0, 0, now=100.0)
    assert progress.stalled_seconds == 0.0
    progress.record_sent(100.0)
    progress.record_returned(100.5)
    record_stages(progress, 1, 1, now=200.0)
    assert progress.stalled_seconds == 0.0


def test_a_frame_that_one_side_sent_and_the_other_never_got() -> None:
    """The stall counts from the last movement, confirmed by every stage, and the losing hop is known."""
    progress = StallDetector(3)
    record_stages(progress, 0, 0, 0, now=0.0)
    progress.record_sent(10.0)
    record_stages(progress, 1, 0, 0, now=11.0)
    assert progress.stalled_seconds == 0.0
    record_stages(progress, 1, 0, 0, now=13.0)
    assert progress.stalled_seconds == 2.0
    assert progress.losing_hop == 1
    progress.record_stage(0, 1, 0, writing=False, now=20.0)
    assert progress.stalled_seconds == 2.0  # the other stages have not reported since


def test_movement_is_no_stall() -> None:
    """A computing stage, a hop that is being written and a returned frame count as movement."""
    progress = StallDetector(2)
    progress.record_sent(0.0)
    record_stages(progress, 1, 0, now=1.0)
    progress.record_stage(1, 0, 500, writing=False, now=5.0)
    assert progress.stalled_seconds == 0.0
    progress.record_stage(0, 1, 0, writing=True, now=9.0)
    progress.record_stage(1, 0, 500, writing=False, now=9.0)
    assert progress.stalled_seconds == 0.0
    progress.record_sent(9.5)
    progress.record_returned(10.0)
    record_stages(progress, 1, 1, now=10.5, busy_us=500)
    assert progress.stalled_seconds < 1.0


def test_relayed_tokens_that_are_lost() -> None:
    """A first stage that has the frame and awaits its tokens lost nothing. A later stage, or the last one, did."""
    progress = StallDetector(2)
    for _ in range(2):
        progress.record_sent(0.0)
    for frames, hop in ((1, 2), (0, 1)):  # of stage 1; stage 0 is done with the first frame of two
        progress.record_stage(1, frames, 0, writing=False, now=1.0)
        progress.record_stage(0, 1, 0, writing=False, now=1.0, awaits_tokens=True)
        assert progress.losing_hop == hop
        progress.record_stage(0, 1, 0, writing=False, now=1.0)
        assert progress.losing_hop == 0


def test_lost_on_the_way_to_the_first_stage_and_back() -> None:
    """Frames can be lost at either end of the pipeline."""
    progress = StallDetector(2)
    progress.record_sent(0.0)
    assert progress.losing_hop == 0
    record_stages(progress, 1, 1, now=1.0)
    assert progress.losing_hop == 2
