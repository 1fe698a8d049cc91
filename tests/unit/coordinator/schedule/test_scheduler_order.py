"""Tests of the order of frames: chunked prefill, micro-batches, cancellation and refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.schedule.request import PrefillProgress
from proto.errors import ProtocolError, RequestError
from proto.frame import Evict, SavePrefix
from tests.support.protocol.scheduler_drive import LIMITS, ROOM, Drive, chunks_of, is_decode
from tests.support.stages.token_stages import plain

# ---- micro-batches and chunks


def test_chunks_of_a_prompt_are_pipelined() -> None:
    """N + 1 chunks are in flight before the first returns, in order, and progress counts computed tokens."""
    drive = Drive(stages=3)
    seq_id = drive.submit(range(1, 31), tokens=1)
    first = drive.fill()
    assert len(first) == 4
    drive.run()
    chunks = chunks_of(drive.stage.seen)
    assert [c.position for c in chunks] == [0, 4, 8, 12, 16, 20, 24, 28]
    assert [t for c in chunks for t in c.tokens] == list(range(1, 31))
    assert [c.sample for c in chunks] == [False] * 7 + [True]
    progress = [e.done for e in drive.events[seq_id] if isinstance(e, PrefillProgress)]
    assert progress == [4, 8, 12, 16, 20, 24, 28, 30]


def test_prompts_share_a_frame_as_whole_chunks() -> None:
    """Short prompts share a frame up to its limit of tokens, the oldest prompt first. None is cut for the limit."""
    drive = Drive(limits=replace(LIMITS, prefill_chunk=6, step_tokens=8))
    for _ in range(3):
        drive.submit((1, 2, 3), tokens=1)
    frames = [drive.send(), drive.send()]
    found = [[(s.seq_id, s.width) for s in frame.segments] for frame in frames if frame is not None]
    assert found == [[(0, 3), (1, 3)], [(2, 3)]]


@pytest.mark.parametrize(("sequences", "stages"), [(4, 4), (8, 4), (5, 2), (3, 2), (7, 3)])
def test_micro_batches_fill_the_pipeline_and_share_it(sequences: int, stages: int) -> None:
    """c sequences on N <= c stages travel in N micro-batches of at most ⌈c/N⌉ rows.

    All sequences get their turns.
    """
    drive = Drive(stages)
    for i in range(sequences):
        drive.submit((1, 2, i), tokens=100)
    drive.run_frames(3 * sequences)  # every prompt is through
    start = len(drive.stage.seen)
    for _ in range(20 * stages):
        drive.fill()
        assert drive.stage.in_flight >= stages
        drive.back()
    frames = [f for f in drive.stage.seen[start:] if f.segments]
    assert all(is_decode(f) and len(f.segments) <= -(-sequences // stages) for f in frames)
    turns = Counter(s.seq_id for f in frames for s in f.segments)
    assert len(turns) == sequences
    assert max(turns.values()) - min(turns.values()) <= 2


@pytest.mark.parametrize(("sequences", "stages"), [(2, 1), (8, 1), (8, 2), (16, 4)])
def test_late_requests_join_full_micro_batches(sequences: int, stages: int) -> None:
    """Requests that arrive one by one soon travel in N full micro-batches, like requests that arrive together."""
    drive = Drive(stages)
    for i in range(sequences):
        drive.submit((1, 2, i), tokens=300)
        drive.fill()
        drive.back()
    drive.run_frames(10 * sequences)
    start = len(drive.stage.seen)
    drive.run_frames(10 * stages)
    rows = [len(f.segments) for f in drive.stage.seen[start:]]
    assert sum(rows) / len(rows) == sequences / stages


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_prompts_do_not_wait_for_streams_to_end(stages: int) -> None:
    """A chunk of a new prompt is sent in every round of the running streams, however many there are."""
    drive = Drive(stages)
    for i in range(8):
        drive.submit((1, 2, i), tokens=500)
        drive.fill()
        drive.back()
    drive.run_frames(30)
    late = drive.submit(range(1, 41), tokens=5)
    drive.run_frames(11 * (stages + 2))
    assert drive.tokens(late)


def test_never_more_micro_batches_than_stages() -> None:
    """At most N micro-batches and N + 1 chunks are in flight, also if sequences become ready one by one.

    The stages may run one frame of a micro-batch ahead of the coordinator.
    """
    drive = Drive(stages=2, limits=replace(LIMITS, step_tokens=4))
    for i in range(12):
        drive.submit((1, 2, 3, i), tokens=50)
    for _ in range(100):
        drive.fill()
        frames = [f for f in drive.stage.under_way if is_decode(f)]
        micro_batches = Counter(tuple(s.seq_id for s in f.segments) for f in frames)
        assert len(micro_batches) <= 2
        assert max(micro_batches.values(), default=0) <= 2
        assert drive.stage.in_flight - len(frames) <= 3
        drive.back()


# ---- cancellation


@pytest.mark.parametrize("prompt", [3, 30], ids=["decoding", "prefilling"])
@pytest.mark.parametrize("returned", range(6))
def test_cancelled_in_flight(prompt: int, returned: int) -> None:
    """A cancelled running sequence is evicted with the next header, with or without frames in flight.

    No event follows, and other sequences continue.
    """
    drive = Drive(stages=2, depth=2)
    other = drive.submit((9, 9), tokens=30)
    gone = drive.submit(range(1, prompt + 1), tokens=30)
    drive.fill()
    for _ in range(returned):
        drive.back()
        drive.fill()
    assert gone in drive.stage.sequences
    events = len(drive.events[gone])
    drive.scheduler.cancel_sequence(gone)
    frame = drive.send()
    assert frame is not None
    assert Evict(gone) in frame.ops
    assert gone not in drive.stage.sequences
    drive.run()
    assert len(drive.events[gone]) == events
    assert drive.tokens(other) == plain((9, 9), 30)


# ---- what is refused


@pytest.mark.parametrize(
    ("prompt", "tokens", "param"),
    [
        ((), 5, "prompt"),
        ((1,), 0, "max_tokens"),
        (range(990), 11, "max_tokens"),
        (range(1000), 1, "prompt"),
    ],
)
def test_requests_that_can_never_be_served(prompt: Sequence[int], tokens: int, param: str) -> None:
    """The error names the field, before the request is queued."""
    drive = Drive()
    with pytest.raises(RequestError) as caught:
        drive.submit(prompt, tokens)
    assert caught.value.param == param
    assert drive.send() is None


@pytest.mark.parametrize("wrong", ["number", "outcomes"])
def test_a_frame_out_of_order_is_refused(wrong: str) -> None:
    """A frame that is not the oldest in flight, or lacks outcomes, raises ProtocolError."""
    drive = Drive(stages=2)
    drive.submit(range(1, 20))
    drive.fill()
    frame = drive.stage.come_back()
    bad = replace(frame, number=1) if wrong == "number" else replace(frame, outcomes=())
    with pytest.raises(ProtocolError):
        drive.scheduler.apply_outcomes(bad, 1.0)


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
