"""A stage computes any well-formed frame or refuses it with a ProtocolError, and never exceeds its budget.

The codec refuses frames that are not well-formed; tests/unit/proto/test_frame.py covers those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp.layers.layer import KVFormat
from proto.errors import ProtocolError, StaleEpochError
from proto.frame import (
    Admit,
    BackUp,
    Commit,
    DropPrefix,
    Evict,
    Frame,
    RestoreBackup,
    RestorePrefix,
    SavePrefix,
    Segment,
    decode,
    encode,
)
from proto.params import SamplingParams
from tests.support.checkpoints.checkpoints import write_checkpoint
from tests.support.stages.chain import VOCAB, modules
from worker.engine.frame_engine import FrameEngine
from worker.engine.stage_state import Budget
from worker.model.stage import StageForward
from worker.model.verifier import Verifier

LAYERS = 4
PREFIX_BYTES = 60_000
"""Bytes. Room for one or two prefix entries of the toy model."""

BUDGET = Budget(sequences=2, kv_tokens=24, prefix_bytes=PREFIX_BYTES)

# The numbers are small so that most frames refer to the same sequences and windows.
few = st.sampled_from([0, 0, 0, 1, 2])
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8]),
    logprobs=st.none() | st.just(2),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
)
operations = st.one_of(
    st.builds(Admit, few, st.integers(0, 14), st.integers(0, 20), params),
    st.builds(Admit, few, st.just(12), st.just(2), params),
    st.builds(Commit, few, st.integers(0, 4), st.integers(0, 4)),
    st.builds(Evict, few),
    st.builds(SavePrefix, few, few),
    st.builds(RestorePrefix, few, few),
    st.builds(DropPrefix, few),
    st.builds(BackUp, few, few),
    st.builds(RestoreBackup, few, few),
)
segments = st.builds(
    Segment,
    few,
    window=st.integers(1, 3),
    position=st.sampled_from([2, 2, 4, 4, 3, 0, 99]),
    tokens=st.lists(st.sampled_from([0, 5, VOCAB - 1, VOCAB - 1]), max_size=4).map(tuple),
    open=st.booleans(),
    sample=st.booleans(),
    drafts=st.integers(0, 3),
    cancelled=st.booleans(),
)
frames = st.builds(
    Frame,
    st.sampled_from([1] * 20 + [2]),
    st.integers(0, 4),
    ops=st.lists(operations, max_size=3).map(tuple),
    segments=st.lists(segments, max_size=2, unique_by=lambda s: s.seq_id).map(tuple),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Frame]:
    """Draw frames that are mostly in order. A valid beginning lets the later frames reach deeper checks."""
    start = (
        Frame(1, 0, (Admit(0, 12, 2, draw(params)),), (Segment(0, 0, 0, (1, 2), sample=True),)),
        Frame(1, 1, (), (Segment(0, 1, 2, (3, 4), open=True, sample=True, drafts=1),)),
    )
    begun = list(start[: draw(st.integers(0, 2))])
    wild = draw(st.lists(frames, max_size=4))
    orderly = [replace(frame, number=len(begun) + i) for i, frame in enumerate(wild)]
    return begun + (orderly if draw(st.integers(0, 9)) else wild)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Sequence[StageForward]:
    path: Path = write_checkpoint(tmp_path_factory.mktemp("toy"), layers=LAYERS)
    ends = [(0, 2, True, False), (2, LAYERS, False, True)]
    return [StageForward(modules(path, *end), KVFormat()) for end in ends]


def test_any_frames_are_computed_or_refused(stages: Sequence[StageForward]) -> None:
    """The first and the last stage compute each frame or refuse it, and many frames are computed.

    The count of computed frames shows that the first check does not reject all of them.
    """
    seen: Counter[str] = Counter()

    @settings(max_examples=300, deadline=None)
    @given(conversation=conversations())
    def explore(conversation: list[Frame]) -> None:
        engines = new_engines(stages)
        for frame in conversation:
            try:
                for engine in engines:
                    frame = engine.process(decode(encode(frame)))
            except (ProtocolError, StaleEpochError):
                seen["refused"] += 1
                return  # the plan has ended
            finally:
                for engine in engines:
                    check_budget(engine)
            seen["computed"] += 1
            assert len(frame.outcomes) == len(frame.segments)

    explore()
    assert min(seen["computed"], seen["refused"]) > 50, seen


def test_prefix_entries_have_a_budget(stages: Sequence[StageForward]) -> None:
    """A prefix entry that would exceed the budget is refused and not stored."""
    engine = new_engines(stages)[0]
    engine.process(Frame(1, 0, (Admit(0, 12, 2),), (Segment(0, 0, 0, (1, 2)),)))
    engine.process(Frame(1, 1, (SavePrefix(0, 0),)))
    entry = engine.report_state().prefixes[0].bytes
    assert 0 < entry <= PREFIX_BYTES < 9 * entry
    with pytest.raises(ProtocolError, match="budget"):
        engine.process(Frame(1, 2, tuple(SavePrefix(0, number) for number in range(1, 9))))
    check_budget(engine)


def new_engines(stages: Sequence[StageForward]) -> list[FrameEngine]:
    first, last = stages
    verifier = Verifier(last.modules, KVFormat())
    return [
        FrameEngine(first, epoch=1, first=True, verifier=None, budget=BUDGET),
        FrameEngine(last, epoch=1, first=False, verifier=verifier, budget=BUDGET),
    ]


def check_budget(engine: FrameEngine) -> None:
    held = engine.report_state()
    assert len(held.sequences) <= BUDGET.sequences
    assert sum(s.capacity for s in held.sequences) <= BUDGET.kv_tokens
    assert all(s.length <= s.capacity for s in held.sequences)
    assert sum(p.bytes for p in held.prefixes) <= PREFIX_BYTES
