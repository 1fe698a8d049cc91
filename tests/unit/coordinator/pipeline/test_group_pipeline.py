"""A pipeline whose stages are groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from coordinator.pipeline.remote_pipeline import RemotePipeline, _check_outcomes
from coordinator.planning.capacity import Capacity
from coordinator.schedule.backups import Backup
from proto.backup import LayerState, ReceivedStates, by_layer
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

    async def write_backup(
        self, epoch: int, seq_id: int, tokens: Sequence[int], states: Iterable[LayerState]
    ) -> None:
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


SAMPLED = Segment(1, 0, 0, (5,), open=True, sample=True)


def test_an_outcome_without_a_token_is_a_protocol_error() -> None:
    """A segment that asked for a token gets one, unless its window was invalidated."""
    with pytest.raises(ProtocolError, match="no token for sequence 1"):
        _check_outcomes(Frame(1, 0, segments=(SAMPLED,), outcomes=(Outcome(1, 0, 1),)))
    _check_outcomes(Frame(1, 0, segments=(SAMPLED,), outcomes=(Outcome(1, 0, 1, token=7),)))
    _check_outcomes(Frame(1, 0, segments=(SAMPLED,), outcomes=(Outcome(1, 0, 0),)))
