"""Compilation of the usual kernels while a stage loads.

MLX compiles a CUDA kernel from source when it first runs, which takes up to 53 seconds on an H200. On Metal it loads or
compiles a kernel at its first use too, which takes milliseconds. Without a warm-up the first clients would wait for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from mtp.device import this_device
from proto.frame import Admit, Commit, Evict, Frame, Op, Outcome, Segment
from proto.params import SamplingParams
from worker.engine.stage_engine import StageEngine, to_bytes
from worker.model.stage import Stage
from worker.model.verifier import Verifier

log = logging.getLogger(__name__)

COMPILE_SECONDS = 120.0
"""Seconds. Longest time that one frame of the warm-up may take, since it may compile several kernels."""

CHUNK = 512
"""Tokens of a prompt chunk: those of the scheduler's default."""

WIDTHS = (1, 2, 4, 5, 1)
"""Rows of the windows. The widths between them run the same kernels."""

LOGGED_FRAMES = 8
"""Frames from one line of the log to the next."""

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


class WarmUp:
    """Frames of the usual shapes for one engine, each made from what the engine said of the frame before."""

    def __init__(self, engine: StageEngine, drafts: int, batches: tuple[int, ...]) -> None:
        self._engine = engine
        self._drafts = drafts
        self._batches = batches
        self.total = sum(count + len(WIDTHS) + 1 for count in batches)
        """Frames in all: one for each prompt, then the windows, and one for the end of the sequences."""
        self.done = 0

    def run(self) -> Iterator[None]:
        """Process the frames for each number of sequences. Yield before each frame."""
        first = 0
        for count in self._batches:
            yield from self._run_batch(range(first, first + count))
            first += count

    def _run_batch(self, ids: range) -> Iterator[None]:
        """Admit sequences, every other one sampled, run windows of all widths and evict them."""
        followers = {}
        for i in ids:
            length = CHUNK if i == ids.start else 1
            params = SAMPLED if i % 2 else SamplingParams()
            admit = Admit(i, CHUNK + sum(WIDTHS), CHUNK, params)
            yield
            outcomes = self._process((admit,), (Segment(i, 0, 0, (0,) * length, sample=True),))
            followers[i] = _Follower(0).after(outcomes.get(i), length)
        for window, width in enumerate(WIDTHS, start=1):
            commits = tuple(Commit(i, window - 1, f.accepted) for i, f in followers.items())
            rest = (0,) * (width - 1)
            segments = tuple(
                Segment(i, window, f.position, (f.token, *rest), open=True, drafts=self._drafts)
                for i, f in followers.items()
            )
            yield
            outcomes = self._process(commits if window > 1 else (), segments)
            followers = {i: f.after(outcomes.get(i), 1) for i, f in followers.items()}
        yield
        self._process(tuple(Evict(i) for i in ids), ())

    def _process(self, ops: tuple[Op, ...], segments: tuple[Segment, ...]) -> dict[int, Outcome]:
        """Let the engine process the next frame. Return its outcomes by sequence, none before the last stage."""
        frame = Frame(0, self.done, ops, segments)
        self.done += 1
        if not self._engine.first and frame.rows:
            stage = self._engine.stage
            rows = mx.zeros((frame.rows, stage.modules.config.hop_width), stage.dtype)
            frame = frame.with_tensor(*to_bytes(rows))
        return {outcome.seq_id: outcome for outcome in self._engine.process(frame).outcomes}


@dataclass(frozen=True)
class _Follower:
    """The end of a sequence: its length, the accepted length of its newest window, and its next token."""

    position: int
    accepted: int = 0
    token: int = 0

    def after(self, outcome: Outcome | None, usual: int) -> _Follower:
        """Return where it goes on after `outcome`, or after `usual` accepted tokens without one."""
        if outcome is None:
            return _Follower(self.position + usual, usual)
        accepted = outcome.accepted_length
        return _Follower(self.position + accepted, accepted, outcome.token or 0)


def warm_up(stage: Stage, *, first: bool, last: bool, expect: Callable[[float], None]) -> None:
    """Run frames of the usual shapes through `stage` and forget them, as the device needs.

    `expect(seconds)` tells the watchdog of the engine thread how long the next frame may take. A frame that fails, for
    example for lack of memory, ends the warm-up; the stage serves all the same.
    """
    batches = this_device().warm_up_batches
    if not batches:
        return
    started = time.monotonic()
    verifier = Verifier(stage.modules, stage.kv_format) if last else None
    drafts = 2 if verifier is not None and verifier.drafter is not None else 0
    engine = StageEngine(stage, epoch=0, first=first, verifier=verifier)
    frames = WarmUp(engine, drafts, batches)
    try:
        for _ in frames.run():
            if frames.done % LOGGED_FRAMES == 0:
                log.info(
                    "compiling kernels", extra={"done": f"{frames.done} of {frames.total} frames"}
                )
            expect(COMPILE_SECONDS)
    except Exception as error:
        if stage.modules.communicator.size > 1:
            raise  # the other members of the group wait in a sum of this frame
        log.warning("warm-up ended early", extra={"frames": frames.done, "error": str(error)[:300]})
    del engine
    mx.clear_cache()
    log.info("kernels compiled", extra={"seconds": round(time.monotonic() - started, 1)})
