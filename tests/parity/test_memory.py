"""What a stage holds does not grow with what it has done: a snapshot goes with its window, a frame with its rows.

Bytes are MLX's own count of live arrays: nothing here is a matter of time or of an allocator.
"""

from __future__ import annotations

import gc
from pathlib import Path

import mlx.core as mx
import pytest

from mtp.head.attention import KVFormat
from proto.frame import Admit, Commit, DropPrefix, Evict, Frame, Op, SavePrefix, Segment
from proto.params import SamplingParams
from proto.span import Span
from tests.conftest import Checkpoints
from tests.support.stages.chain import EPOCH, Chain, Script, modules, random_tokens
from worker.engine.stage_engine import StageEngine
from worker.model.stage import Stage

HIDDEN = 64
ROW = bytes(4 * HIDDEN)
PROMPT = 6
LONG = 1200

SHARED = 2 * 16 * 1024
"""MLX makes no copy of a view that would save less than 16 KB; two of them are let pass."""

CONV_STATE = 3 * 256 * 4
"""Bytes of the smallest array of a snapshot."""

PATTERN = [(2, 1), (1, 1), (3, 0), (2, 2), (4, 1), (1, 0), (2, 1), (1, 1), (2, 0), (1, 1)]
"""Widths of windows, and what each keeps; after each comes one built on it that keeps nothing."""


def _live() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


class MiddleStage:
    """A stage of one GDN and one attention layer, fed by hand: the cheapest that has every kind of state."""

    def __init__(self, path: Path) -> None:
        loaded = modules(path, 2, 4, False, False)
        assert loaded.span == Span(2, 4)
        self.engine = StageEngine(
            Stage(loaded, KVFormat()), epoch=EPOCH, first=False, verifier=None
        )
        self.frames = self.end = 0
        self.ops: list[Op] = [Admit(0, 100_000, PROMPT)]
        self._send(PROMPT, stays_open=False)

    def _send(self, width: int, *, stays_open: bool = True) -> None:
        """A segment at the sequence's end; its window has the frame's number."""
        segment = Segment(0, self.frames, self.end, (1,) * width, open=stays_open)
        frame = Frame(EPOCH, self.frames, tuple(self.ops), (segment,))
        self.engine.process(frame.with_tensor("float32", (width, HIDDEN), ROW * width))
        self.frames, self.end, self.ops = self.frames + 1, self.end + width, []

    def a_round(self) -> None:
        """Twenty windows, two open before either is settled."""
        for width, accepted_length in PATTERN:
            number, start = self.frames, self.end
            self._send(width)
            self._send(2)
            if accepted_length < width:
                self.engine.rollback(EPOCH, 0, number, accepted_length)
                self.end = start + accepted_length
                self.ops = [Commit(0, number, accepted_length)]
            else:
                self.ops = [Commit(0, number, accepted_length), Commit(0, number + 1, 0)]
                self.end = start + width

    def beside_its_state(self) -> int:
        """Bytes that live beside the sequence's present K/V and GDN state, all windows settled."""
        self.engine.process(Frame(EPOCH, self.frames, tuple(self.ops)))
        self.frames, self.ops = self.frames + 1, []
        (held,) = self.engine.report_state().sequences
        assert held.committed == self.end and not held.open_windows
        mx.eval(*self.engine.sequences[0].arrays())
        return _live() - held.nbytes


@pytest.mark.parametrize(
    "windows",
    [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_no_snapshot_outlives_its_window(checkpoints: Checkpoints, windows: int) -> None:
    """After thousands of windows of one sequence, kept, cut and dropped, a stage holds beside its present state what it
    held after the first twenty."""
    stage = MiddleStage(checkpoints(layers=4))
    stage.a_round()
    after_one = stage.beside_its_state()
    for _ in range(windows // (2 * len(PATTERN)) - 1):
        stage.a_round()
    assert abs(stage.beside_its_state() - after_one) < CONV_STATE


def test_a_chain_that_drafts_forgets_what_it_tried(checkpoints: Checkpoints) -> None:
    """The last stage too, its head, its drafts' scores, its penalties' counts: after every request the same bytes."""
    chain = Chain(checkpoints(layers=4), (2,))
    params = SamplingParams(temperature=1.0, presence_penalty=0.5, acceptance="ratio")
    seen = []
    for seq_id in range(12):
        script = Script(seq_id, random_tokens(PROMPT), params)
        script.run(chain, script.chunk(PROMPT, drafts=3))
        for _ in range(8):
            script.run(chain, script.next_window(drafts=seq_id % 4))
        chain.send(ops=[*script.due(), Evict(seq_id)])
        chain.logits.clear()
        chain.draft_logits.clear()
        seen.append(_live())
    assert len(set(seen[1:])) == 1, seen


def test_an_open_window_does_not_keep_its_neighbours_rows(checkpoints: Checkpoints) -> None:
    """A window that shares a frame with a long prompt chunk holds its own rows, not the chunk's, and the pairs that
    wait for the head do not hold the frame's hidden states: no more than after a frame of its own."""
    chain = Chain(checkpoints(layers=4), (3,))
    held = []
    for seq_id, together in ((0, False), (2, True)):
        window, long = (
            Script(seq_id, random_tokens(PROMPT)),
            Script(seq_id + 1, random_tokens(LONG)),
        )
        window.run(chain, window.chunk(PROMPT))
        before = _live()
        frames = [[window.next_window()], [long.chunk(LONG, sample=False)]]
        ops = [*window.due(), *long.due()]
        for segments in [[*frames[0], *frames[1]]] if together else frames:
            chain.send(*segments, ops=ops)
            ops = []
        chain.send(ops=[Evict(seq_id + 1)])
        chain.logits.clear()
        held.append(_live() - before)
        chain.send(ops=[Evict(seq_id)])
    assert held[1] <= held[0] + SHARED


@pytest.mark.parametrize("company", [0, 7])
def test_a_saved_prefix_weighs_what_it_says(checkpoints: Checkpoints, company: int) -> None:
    """With its sequence gone, and those that shared its last frame, an entry holds `nbytes` and no spare room; dropped,
    nothing of it stays."""
    chain = Chain(checkpoints(layers=4), (2,))
    for turn in (0, 1):
        start = _live()
        scripts = [Script(100 * turn + i, random_tokens(40)) for i in range(1 + company)]
        segments = [script.chunk(40) for script in scripts]
        chain.send(*segments, ops=[op for script in scripts for op in script.due()])
        chain.send(ops=[SavePrefix(scripts[0].seq_id, 7), *(Evict(s.seq_id) for s in scripts)])
        chain.logits.clear()
        held = _live() - start
        entries = [h for engine in chain.engines for h in engine.report_state().prefixes]
        assert [h.length for h in entries] == [40, 40]
        named = sum(h.nbytes for h in entries)
        assert named <= held < named + SHARED
        chain.send(ops=[DropPrefix(7)])
        assert _live() == start or turn == 0
