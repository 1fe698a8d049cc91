"""The warm-up of a stage: frames of the usual shapes, for which the device compiles its kernels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx

from mtp.device import this_device
from mtp.layers.kernel_files import FILES
from proto.frame import Admit, Commit, Evict, Frame, Op, Outcome, Segment
from proto.params import SamplingParams
from worker.engine.frame_engine import CHUNK, FrameEngine, to_bytes
from worker.model.stage import StageForward
from worker.model.verifier import Verifier

log = logging.getLogger(__name__)

COMPILE_SECONDS = 120.0
"""Seconds. Longest time that one frame of the warm-up may take, since it may compile several kernels."""

WIDTHS = (1, 2, 4, 5, 1)
"""Rows of the windows. The widths between them run the same kernels."""

LOGGED_FRAMES = 8
"""Frames from one line of the log to the next."""

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


def warm_up(stage: StageForward, *, first: bool, last: bool, expect: Callable[[float], None]) -> None:
    """Run frames of the usual shapes through `stage` and forget them, as the device needs.

    MLX compiles a CUDA kernel of its own when it first runs, and keeps it on disk. The slow ones are there already, by
    `mtp.layers.mlx_modules`. On Metal MLX loads or compiles a kernel at its first use too, which takes milliseconds.

    `expect(seconds)` tells the watchdog of the engine thread how long the next frame may take. A frame that fails, for
    example for lack of memory, ends the warm-up; the stage serves all the same.
    """
    batches = this_device().warm_up_batches
    if not batches:
        return
    started = time.monotonic()
    verifier = Verifier(stage.modules, stage.kv_format) if last else None
    engine = FrameEngine(stage, epoch=0, first=first, verifier=verifier)
    total = sum(count + len(WIDTHS) + 1 for count in batches)
    try:
        for _ in run_frames(engine, batches):
            if engine.frames_done % LOGGED_FRAMES == 0:
                done = f"{engine.frames_done} of {total} frames"
                log.info("compiling kernels", extra={"done": done, "kernels": FILES.describe()})
            expect(COMPILE_SECONDS)
    except Exception as error:
        if stage.modules.communicator.size > 1:
            raise  # the other members of the group wait in a sum of this frame
        log.warning(
            "warm-up ended early. If a kernel fails on this machine, use --kernels mlx",
            extra={"frames": engine.frames_done, "error": str(error)[:300]},
        )
    del engine
    mx.clear_cache()
    seconds = round(time.monotonic() - started, 1)
    log.info("kernels compiled", extra={"seconds": seconds, "kernels": FILES.describe(), "folder": str(FILES.folder)})


def run_frames(engine: FrameEngine, batches: Sequence[int]) -> Iterator[None]:
    """For each number of sequences admit them, run windows of all widths, and evict them. Yield before each frame.

    Every other sequence is sampled.
    """
    verifier = engine.verifier
    drafts = 2 if verifier is not None and verifier.drafter is not None else 0
    for batch in batches:
        found, ends = dict[int, Outcome](), dict.fromkeys(range(batch), 0)
        for i in ends:
            admit = Admit(i, CHUNK + sum(WIDTHS), CHUNK, SAMPLED if i % 2 else SamplingParams())
            prompt = (0,) * (1 if i else CHUNK)
            yield
            found |= _process(engine, (admit,), (Segment(i, 0, 0, prompt, sample=True),))
        for window, width in enumerate(WIDTHS, start=1):
            for i, outcome in found.items():
                ends[i] += outcome.accepted_length
            commits = tuple(Commit(i, window - 1, o.accepted_length) for i, o in found.items())
            rest = (0,) * (width - 1)
            segments = tuple(
                Segment(i, window, ends[i], (o.token or 0, *rest), open=True, drafts=drafts) for i, o in found.items()
            )
            yield
            found = _process(engine, commits if window > 1 else (), segments)
        yield
        _process(engine, tuple(Evict(i) for i in ends), ())


def _process(engine: FrameEngine, ops: tuple[Op, ...], segments: tuple[Segment, ...]) -> dict[int, Outcome]:
    """Let the engine process the next frame. Return the outcomes, without a last stage those of one token a window."""
    frame = Frame(0, engine.frames_done, ops, segments)
    if not engine.first and frame.rows:
        rows = mx.zeros((frame.rows, engine.stage.modules.config.shape.hop_width), engine.stage.dtype)
        frame = frame.with_tensor(*to_bytes(rows))
    usual = (Outcome(s.seq_id, s.window, 1 if s.open else s.width) for s in segments)
    return {o.seq_id: o for o in engine.process(frame).outcomes or usual}
