"""A stage's memory does not grow with its work: snapshots end with their window, rows with their frame.

Bytes are MLX's own count of live arrays, so neither time nor the allocator affects them.
"""

from __future__ import annotations

import gc
from pathlib import Path

import mlx.core as mx
import pytest

from coordinator.pipeline.local_pipeline import LocalModel
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.layer import KVFormat
from proto.frame import Admit, Commit, DropPrefix, Evict, Frame, Op, SavePrefix, Segment
from proto.params import SamplingParams
from proto.span import Span
from proto.stage_options import StageOptions
from tests.conftest import Checkpoints
from tests.support.stages.chain import EPOCH, Chain, Script, modules, random_tokens
from worker.engine.frame_engine import FrameEngine
from worker.model.stage import StageForward

pytestmark = pytest.mark.thorough

HIDDEN = 64
ROW = bytes(4 * HIDDEN)
PROMPT = 6
LONG = 1200

SHARED = 2 * 16 * 1024
"""Bytes. MLX does not copy a view if that saves less than 16 KB; the tests allow two of those views."""

CONV_STATE = 3 * 256 * 4
"""Bytes of the smallest array of a snapshot."""

PATTERN = [(2, 1), (1, 1), (3, 0), (2, 2), (4, 1), (1, 0), (2, 1), (1, 1), (2, 0), (1, 1)]
"""Widths of windows and their accepted lengths. Each is followed by a window built on it that is invalidated."""


def _live() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


class MiddleStage:
    """A stage of one GDN and one attention layer: the cheapest with every kind of state."""

    def __init__(self, path: Path) -> None:
        loaded = modules(path, 2, 4, False, False)
        assert loaded.span == Span(2, 4)
        self.engine = FrameEngine(StageForward(loaded, KVFormat()), epoch=EPOCH, first=False, verifier=None)
        self.frames = self.end = 0
        self.ops: list[Op] = [Admit(0, 100_000, PROMPT)]
        self._send(PROMPT, stays_open=False)

    def _send(self, width: int, *, stays_open: bool = True) -> None:
        """Send a segment at the sequence's end. Its window number is the frame number."""
        segment = Segment(0, self.frames, self.end, (1,) * width, open=stays_open)
        frame = Frame(EPOCH, self.frames, tuple(self.ops), (segment,))
        self.engine.process(frame.with_tensor("float32", (width, HIDDEN), ROW * width))
        self.frames, self.end, self.ops = self.frames + 1, self.end + width, []

    def run_twenty_windows(self) -> None:
        """Run twenty windows, with two open before either has an outcome."""
        for width, accepted_length in PATTERN:
            number, start = self.frames, self.end
            self._send(width)
            self._send(2)
            if accepted_length < width:
                self.engine.rollback(EPOCH, 0, number, width - accepted_length)
                self.end = start + accepted_length
                self.ops = [Commit(0, number, accepted_length)]
            else:
                self.ops = [Commit(0, number, accepted_length), Commit(0, number + 1, 0)]
                self.end = start + width

    def bytes_besides_state(self) -> int:
        """Return the live bytes besides the sequence's present K/V and GDN state, with all windows closed."""
        self.engine.process(Frame(EPOCH, self.frames, tuple(self.ops)))
        self.frames, self.ops = self.frames + 1, []
        (held,) = self.engine.report_state().sequences
        assert held.length == self.end and not held.open_windows
        mx.eval(*self.engine.sequences[0].arrays())
        return _live() - held.bytes


@pytest.mark.parametrize("windows", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_snapshots_end_with_their_window(checkpoints: Checkpoints, windows: int) -> None:
    """After thousands of windows a stage holds what it held after the first twenty, besides its present state.

    The windows are accepted, shortened and invalidated.
    """
    stage = MiddleStage(checkpoints(layers=4))
    stage.run_twenty_windows()
    after_one = stage.bytes_besides_state()
    for _ in range(windows // (2 * len(PATTERN)) - 1):
        stage.run_twenty_windows()
    assert abs(stage.bytes_besides_state() - after_one) < CONV_STATE


def test_a_drafting_chain_holds_constant_memory(checkpoints: Checkpoints) -> None:
    """The last stage, its head, drafts and penalty counts hold the same bytes after every request."""
    chain = Chain(checkpoints(layers=4), (2,))
    params = SamplingParams(temperature=1.0, presence_penalty=0.5)
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


@pytest.mark.slow
def test_an_open_window_holds_its_own_rows_only(checkpoints: Checkpoints) -> None:
    """An open window holds its own rows only, not those of a prompt chunk in the same frame.

    The pairs that wait for the head do not hold the frame's hidden states either. The memory equals that of a frame
    with the window alone.
    """
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


@pytest.mark.parametrize("others", [0, 7])
def test_a_prefix_entry_holds_its_nbytes(checkpoints: Checkpoints, others: int) -> None:
    """A prefix entry holds `nbytes` once its sequence and the others of its last frame are gone, and then nothing.

    The head's newest row may be a view of its waiting rows. The first turn fills the tables that all sequences share.
    """
    chain = Chain(checkpoints(layers=4), (2,))
    for turn in range(3):
        start = _live()
        scripts = [Script(100 * turn + i, random_tokens(40)) for i in range(1 + others)]
        segments = [script.chunk(40) for script in scripts]
        chain.send(*segments, ops=[op for script in scripts for op in script.due()])
        chain.send(ops=[SavePrefix(scripts[0].seq_id, 7), *(Evict(s.seq_id) for s in scripts)])
        chain.logits.clear()
        held = _live() - start
        entries = [h for engine in chain.engines for h in engine.report_state().prefixes]
        assert [h.length for h in entries] == [40, 40]
        named = sum(h.bytes for h in entries)
        assert not turn or named - len(ROW) <= held < named + SHARED
        chain.send(ops=[DropPrefix(7)])
        assert _live() == start or turn == 0


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("chunks", [(128, 52), (64, 64), (127, 1), (96, 63)])
def test_prefix_entries_stay_within_the_estimate(
    checkpoints: Checkpoints, bits: int | None, chunks: tuple[int, ...]
) -> None:
    """An entry stays within the estimate for any number of hidden states that wait for the head.

    Up to 63 wait, and each is wider than the K/V it becomes.
    """
    path = checkpoints()
    config = Checkpoint.open(path).config
    form = KVFormat.of(config.head_dim, bits)
    model = LocalModel(Checkpoint.open(path), StageOptions(kv_bits=bits))
    chain = Chain(path, kv_format=form)
    (engine,) = chain.engines
    end = 0
    for number, width in enumerate(chunks):
        ops = (Admit(0, 300, 200),) if number == 0 else ()
        segment = Segment(0, number, end, (1,) * width, sample=False)
        engine.process(Frame(1, number, ops, (segment,)))
        end += width
    engine.process(Frame(1, len(chunks), (SavePrefix(0, 0),)))
    (entry,) = engine.report_state().prefixes
    assert entry.bytes <= model.capacity().entry_bytes(end)
