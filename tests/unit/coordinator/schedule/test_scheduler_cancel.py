"""Tests of the condition for a cancel signal to the stages when a client has left."""

from __future__ import annotations

from dataclasses import replace

from proto.frame import SavePrefix
from tests.support.protocol.scheduler_drive import LIMITS, ROOM, Drive

PROMPT = range(1, 201)
"""Long enough for a prefix entry, which ends at 192."""


def _drive(prefix_bytes: int) -> Drive:
    room = replace(ROOM, prefix_bytes=prefix_bytes, token_bytes=1)
    return Drive(stages=3, limits=replace(LIMITS, prefill_chunk=64, step_tokens=64), room=room)


def test_nothing_is_skipped_while_a_prefix_entry_is_being_saved() -> None:
    """No segment is skipped until the last chunk of a prefix entry is computed.

    A signal that overtakes the chunk would make the entry shorter on the stages that it reached. The Evict in the next
    header must do.
    """
    drive = _drive(prefix_bytes=1000)
    seq_id = drive.submit(PROMPT)
    frames = drive.fill()
    assert [any(isinstance(op, SavePrefix) for op in f.ops) for f in frames] == [False] * 3 + [True]
    for _ in range(3):
        assert not drive.scheduler.can_skip(seq_id)
        drive.back()
    assert drive.scheduler.can_skip(seq_id)


def test_a_sequence_without_a_new_entry_may_be_skipped_at_once() -> None:
    """A sequence without a new entry may be skipped at once. A waiting or unknown one has nothing in flight."""
    drive = _drive(prefix_bytes=0)
    seq_id = drive.submit(PROMPT)
    assert not drive.scheduler.can_skip(seq_id)
    drive.fill()
    assert drive.scheduler.can_skip(seq_id)
    drive.scheduler.cancel_sequence(seq_id)
    assert not drive.scheduler.can_skip(seq_id)
    assert not drive.scheduler.can_skip(99)
