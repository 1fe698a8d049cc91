"""The host of stages, of a worker or a coordinator that serves alone: it loads and runs them on the engine thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from weakref import WeakValueDictionary

import mlx.core as mx

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.cut import Cut
from mtp.device import Arithmetic, this_device
from mtp.head.draft_vocabulary import drafted_share
from mtp.layers.communicator import ALONE, Communicator, GroupCommunicator
from proto.control import Kernels
from proto.errors import MemoryLimitError
from proto.frame import Admit, Commit, Evict, Frame, Op, Outcome, Segment
from proto.frame_stamps import FrameStamps, StampRing
from proto.params import SamplingParams
from proto.span import Span
from proto.terminal.progress import OnProgress
from worker.disk.block_index import BlockIndex
from worker.engine import hardware
from worker.engine.engine_thread import EngineThread
from worker.engine.group import JOIN_SECONDS, GroupSpec, join_group, measure_collective
from worker.engine.prefix_disk import StagePrefixes, namespace_of
from worker.engine.stage_engine import UNLIMITED, BegunFrame, Budget, StageEngine, to_bytes
from worker.model.loader import DTYPES, load_stage
from worker.model.stage import Stage
from worker.model.verifier import Verifier

log = logging.getLogger(__name__)

FIRST_SECONDS = 30.0
"""Seconds. Deadline of the first frame, and upper bound for a frame of a new size. Kernels are compiled and pages are
read then, and the speed of the machine is unknown."""

NEW_SIZE_SECONDS = 2.0
"""Seconds added for the first frame of a size, whose kernels may have to be compiled."""

GROUP_SECONDS = 10.0
"""Seconds. Least deadline of a frame of a group. A member waits in its sums while another one is busy or compiles, and
one that is lost is noticed by its silence."""

SLACK = 4.0
"""Factor over the usual time of a size, for other programs, swapping and a hot machine."""

VOCABULARY_SECONDS = 20.0
"""Seconds added for a frame that brings a vocabulary. The last stage prepares 250,000 tokens in about 3 s."""

SMOOTHING = 0.2
"""Weight of the newest frame in the usual time."""

Size = tuple[int, int]
"""The rows and the farthest position, as powers of two. The time of a pass depends on these."""


class DeadlineEstimate:
    """The learned times of frames by size. No deadline is below `least` seconds."""

    def __init__(self, least: float = 0.0) -> None:
        self._least = least
        self._usual: dict[Size, float] = {}

    def seconds(self, frame: Frame) -> float:
        """Return the deadline of `frame` in seconds."""
        extra = VOCABULARY_SECONDS if _brings_vocabulary(frame) else 0.0
        return max(self._least, self._learned(frame)) + extra

    def _learned(self, frame: Frame) -> float:
        if not self._usual:
            return FIRST_SECONDS
        size = _size(frame)
        if (usual := self._usual.get(size)) is not None:
            return SLACK * usual
        rows, end = size
        expected = min(  # the cost grows at most with rows times positions
            usual * 2.0 ** (max(0, rows - seen_rows) + max(0, end - seen_end))
            for (seen_rows, seen_end), usual in self._usual.items()
        )
        return min(FIRST_SECONDS, NEW_SIZE_SECONDS + SLACK * expected)

    def record_frame_time(self, frame: Frame, seconds: float) -> None:
        """Record that `frame` took `seconds`."""
        if _brings_vocabulary(frame):
            return
        size = _size(frame)
        usual = self._usual.get(size, seconds)
        self._usual[size] = usual + SMOOTHING * (seconds - usual)


def _brings_vocabulary(frame: Frame) -> bool:
    return any(isinstance(op, Admit) and op.vocabulary for op in frame.ops)


def _size(frame: Frame) -> Size:
    end = max((segment.position + segment.width for segment in frame.segments), default=0)
    return frame.rows.bit_length(), end.bit_length()


PATIENCE = 0.5
"""Share of a frame's time to wait for the frame after it. The device is busy for the whole of that time."""

LONGEST_WAIT = 0.02
"""Seconds. Upper bound of that wait."""

TRIED_FRAMES = 16
"""Frames of a trial. The median of their intervals counts."""

SETTLED_FRAMES = 1024
"""Frames after which the other way is tried again."""


@dataclass
class Lead:
    """A choice of the first member of a group: to begin a frame before it has finished the one before, or not.

    The result of that one then waits until Python has built the next, and so does the coordinator's answer to it. That
    costs nothing while the device is busy for longer. Where building takes longer, as on a fast GPU, it costs a round
    trip for each token. So both ways are tried, and the one with the shorter interval between frames is kept.
    """

    ahead: bool = True
    trying: bool = True
    _known: dict[bool, float] = field(default_factory=dict)
    _recent: list[float] = field(default_factory=list)

    def record_interval(self, seconds: float) -> None:
        """Record the time between the ends of two frames that follow each other."""
        self._recent.append(seconds)
        if len(self._recent) < (TRIED_FRAMES if self.trying else SETTLED_FRAMES):
            return
        self._known[self.ahead] = median(self._recent)
        self._recent.clear()
        if self.trying and len(self._known) == 2:
            self.ahead, self.trying = min(self._known, key=self._known.__getitem__), False
        else:
            self.ahead, self.trying = not self.ahead, True


@dataclass(eq=False)
class StageTimes:
    """The times that one loaded stage has shown. Another stage starts anew, because its model may be slower."""

    deadlines: DeadlineEstimate = field(default_factory=lambda: DeadlineEstimate(this_device().compile_seconds))
    usual: float = 0.0
    """Seconds that the newest finished frame took."""
    _leads: dict[int, Lead] = field(default_factory=dict)
    """By the bit length of a frame's windows."""
    _ended: tuple[int, float] = (-1, 0.0)
    """The number of the newest finished frame, and when that was in seconds of `time.perf_counter`."""

    def lead_of(self, frame: Frame) -> Lead:
        """Return the choice for frames with as many windows as `frame`."""
        return self._leads.setdefault(len(frame.segments).bit_length(), Lead())

    def record_end(self, frame: Frame, out: Frame) -> None:
        """Record that `frame` has ended now as `out`."""
        (number, before), now = self._ended, time.perf_counter()
        if frame.continues and number == frame.number - 1:
            self.lead_of(frame).record_interval(now - before)
        self._ended = frame.number, now
        self.usual = out.stage_us[-1] / 1e6
        self.deadlines.record_frame_time(out, self.usual)


OnDone = Callable[[Frame], None]
OnError = Callable[[Exception], None]

PART_SECONDS = 10.0
"""Seconds. Deadline of reading one part of a stage, besides the time of its bytes."""

TRIAL_SECONDS = 60.0
"""Seconds. Bound of the trials of kernels, which compile them."""

PROBE_SECONDS = 600.0
"""Seconds. Bound of the check of `--exact`. On CUDA it compiles each kernel of a quantization for up to a minute."""

SLOWEST_DISK = 50e6
"""Bytes per second of a slow network disk. It extends PART_SECONDS, the deadline of one part, by the part's size."""


@dataclass(frozen=True)
class StageSpec:
    """A stage of a plan. `dtype` None keeps the stored types; `kv_bits` None leaves keys and values unquantized.

    With `mtp` the last stage has the MTP head, if the checkpoint has one. With `exact` a row has the same bits with any
    rows beside it, and each layer is computed in `slices`. The head drafts the tokens of the bitmap `draft_vocab`.
    """

    span: Span
    first: bool
    last: bool
    dtype: str | None = None
    kv_bits: int | None = None
    mtp: bool = True
    exact: bool = False
    slices: int = 1
    group: GroupSpec | None = None
    """The group of processes that hold the stage together; None for one process."""
    draft_vocab: bytes = b""


@dataclass(frozen=True)
class LoadedStage:
    """A stage in memory. `weight_bytes` is the size of its weights in the files."""

    spec: StageSpec
    stage: Stage
    weight_bytes: int
    prefixes: StagePrefixes | None = None
    """Its prefixes on disk, None without a folder."""
    collective: float = 0.0
    """Seconds of a sum over the members of its group, 0 for one process."""
    times: StageTimes = field(default_factory=StageTimes)


class StageHost:
    """The parts of a process that successive plans share. Construct it on the event loop that waits for the thread."""

    def __init__(self, disk: BlockIndex | None = None) -> None:
        self.thread = EngineThread()
        self.disk = disk
        """The prefixes on disk, None without a folder."""
        self.stamps = StampRing()
        """Stamps of the newest frames on the stages."""
        self._times = StageTimes()
        """The times of the newest engine's stage."""
        self._trimmer = hardware.CacheTrimmer()
        self._stage_prefixes = WeakValueDictionary[int, StagePrefixes]()
        """By id. The prefixes of a former stage stay while they are written."""
        self.thread.on_idle = self._trimmer.clear

    # ---- on the engine thread

    def load(
        self,
        open_checkpoint: Callable[[], Checkpoint],
        spec: StageSpec,
        on_progress: OnProgress | None,
        *,
        memory_limit: int | None = None,
        wired: bool = True,
        kernels: Kernels = Kernels.auto,
        state: Path | None = None,
        fingerprint: str = "",
    ) -> LoadedStage:
        """Load a stage, after the memory of the one before is released. The watchdog's deadline moves with each part.

        `fingerprint` is that of the whole checkpoint, which a copy of some parts cannot compute.
        Raises MemoryLimitError before any weight is read, and the errors of `open_checkpoint` and `load_stage`.
        """
        expect = self.thread.expect
        expect(PART_SECONDS)
        hardware.release_weights()
        group: GroupCommunicator | None = None
        if spec.group is not None:
            # First, because MLX holds Python's lock until all members have come, and no status is sent meanwhile.
            expect(JOIN_SECONDS)
            group = join_group(spec.group, exact=spec.exact)
            expect(PART_SECONDS)
        communicator: Communicator = group or ALONE
        whole = open_checkpoint()
        checkpoint = whole.cut_for(Cut(communicator.rank, communicator.size))
        sizes = checkpoint.part_bytes()
        parts = checkpoint.stage_parts(spec.span, first=spec.first, last=spec.last, with_head=spec.mtp)
        weight_bytes = sum(sizes[part] for part in parts)
        if "mtp" in parts:
            unembedding = "embed" if whole.config.tie_word_embeddings else "lm_head"
            rows = drafted_share(spec.draft_vocab, whole.config.vocab_size)
            weight_bytes += int(whole.part_bytes()[unembedding] * rows)
        if memory_limit is not None and weight_bytes > memory_limit:
            raise MemoryLimitError(
                f"layers {spec.span} take {weight_bytes:,} bytes, which exceeds the memory limit of {memory_limit:,}"
            )
        seconds = PART_SECONDS + max(sizes[part] for part in parts) / SLOWEST_DISK

        def report(done: int, total: int) -> None:
            """Extend the deadline and report the progress."""
            expect(seconds)
            if on_progress is not None:
                on_progress(done, total)

        collective = 0.0
        if group is not None:
            expect(JOIN_SECONDS)  # other members may still open the checkpoint
            hidden, dtype = checkpoint.config.hidden_size, DTYPES[spec.dtype or "bfloat16"]
            collective = measure_collective(group, hidden, dtype)
            expect(seconds)
        modules = load_stage(
            whole,
            spec.span,
            first=spec.first,
            last=spec.last,
            dtype=DTYPES[spec.dtype] if spec.dtype else None,
            with_head=spec.mtp,
            on_progress=report,
            communicator=communicator,
            slices=spec.slices,
            draft_vocab=spec.draft_vocab,
        )
        if spec.last and spec.mtp and modules.head is None and checkpoint.mtp.announced:
            log.warning(
                "no MTP: config.json announces a head, but tensors of it are missing",
                extra={"checkpoint": checkpoint.path.name, "missing": len(checkpoint.mtp.missing)},
            )
        hardware.wire_weights(wanted=wired)
        kv_format = checkpoint.config.kv_format(spec.kv_bits)
        expect(PROBE_SECONDS if spec.exact else TRIAL_SECONDS)
        stage = Stage(modules, kv_format, exact=spec.exact, kernels=kernels, state=state)
        hardware.warn_of_emulated_bfloat16(stage.dtype)
        if group is not None:  # other members may read their weights from a slower disk
            expect(PROBE_SECONDS + weight_bytes / SLOWEST_DISK)
            mx.eval(group.sum(mx.zeros(1)))
        warm_up(stage, first=spec.first, last=spec.last, expect=expect)
        hardware.trim_allocator()
        prefixes = self._prefixes(fingerprint or whole.fingerprint(), spec, stage)
        return LoadedStage(spec, stage, weight_bytes, prefixes, collective)

    def _prefixes(self, fingerprint: str, spec: StageSpec, stage: Stage) -> StagePrefixes | None:
        """Return the prefixes of a stage on disk, which for a member of a group are those of its share."""
        if self.disk is None:
            return None
        namespace = namespace_of(
            fingerprint,
            Arithmetic.here(),
            stage.dtype,
            spec.kv_bits,
            spec.exact,
            spec.slices,
            stage.variants.arithmetic,
            *(() if spec.group is None else (spec.group.rank, len(spec.group.hosts))),
        )
        # The MTP head counts as a layer after the last one.
        end = spec.span.end + (spec.last and stage.modules.head is not None)
        prefixes = StagePrefixes(self.disk, namespace, Span(spec.span.start, end), self.thread)
        self._stage_prefixes[id(prefixes)] = prefixes
        return prefixes

    async def close(self) -> None:
        """End the writing of prefixes, and the engine thread."""
        await asyncio.gather(*(one.close() for one in [*self._stage_prefixes.values()]))
        await self.thread.close()

    def make_engine(self, loaded: LoadedStage, epoch: int, budget: Budget = UNLIMITED) -> StageEngine:
        """Return an engine without sequences for plan `epoch`."""
        stage, spec, self._times = loaded.stage, loaded.spec, loaded.times
        verifier = Verifier(stage.modules, stage.kv_format) if spec.last else None
        engine = StageEngine(stage, epoch=epoch, first=spec.first, verifier=verifier, budget=budget)
        engine.disk = loaded.prefixes
        return engine

    def run_frame(
        self,
        engine: StageEngine,
        frame: Frame,
        stamps: FrameStamps,
        on_done: OnDone,
        on_error: OnError,
    ) -> None:
        """Begin `frame`. Call `on_done` or `on_error` now, or when the next one has come. A failed engine runs none.

        After an error nothing is called any more: the first one stays, and no later frame is sent.
        """
        least = GROUP_SECONDS if engine.group.size > 1 else 0.0
        seconds = max(self._times.deadlines.seconds(frame), least)
        self.thread.expect(seconds)
        if not (may_overlap(frame) and self._runs_ahead(engine, frame)):
            self.thread.run_deferred(partial(engine.stage.expect_chunks, frame.segments))
            if engine.failed:
                return
            self.thread.expect(seconds)
        begun = _begin(engine, frame, stamps)
        self.thread.run_deferred()
        if engine.failed:
            return
        engine.failed = isinstance(begun, Exception)
        del engine  # after a failure no thread may keep its weights in memory
        if isinstance(begun, Exception):
            on_error(begun)
            return
        finish = partial(self._finish_frame, begun, seconds, on_done, on_error)
        queued, engine = self.thread.queued, begun.engine
        runs_ahead = (frame.continues or queued) and self._runs_ahead(engine, frame)
        chunks_only = not any(segment.open for segment in frame.segments)
        if runs_ahead or (queued and chunks_only and engine.stage.token_layers):
            self.thread.defer(finish, min(LONGEST_WAIT, PATIENCE * self._times.usual))
        else:
            finish()

    def _runs_ahead(self, engine: StageEngine, frame: Frame) -> bool:
        if not engine.can_run_ahead(frame):
            return False
        # No program waits for the results of the other members.
        decides = engine.group.size > 1 and engine.group.rank == 0 and frame.continues
        return not decides or self._times.lead_of(frame).ahead

    def _finish_frame(self, begun: BegunFrame, seconds: float, on_done: OnDone, on_error: OnError) -> None:
        if begun.engine.failed:
            return
        try:
            self.thread.expect(seconds)
            out = begun.finish_frame()
            on_done(out)
            self._times.record_end(begun.frame, out)
            begun.clean_up()
        except Exception as error:
            begun.engine.failed = True
            on_error(error)
            return
        self._trimmer.record_frame(out)


def may_overlap(frame: Frame) -> bool:
    """Return whether `frame` needs no result of the one before.

    Its windows continue that one, or it has prompt chunks alone. Operations and first drafts may need the head's pairs.
    A stage reserves memory for the activations of two chunks of CHUNK tokens, and not of longer ones.
    """
    return frame.continues or (
        0 < frame.rows <= CHUNK
        and not frame.ops
        and not any(segment.open or segment.drafts for segment in frame.segments)
    )


def _begin(engine: StageEngine, frame: Frame, stamps: FrameStamps) -> BegunFrame | Exception:
    try:
        return engine.begin_frame(frame, stamps)
    except Exception as error:
        return error


# ---- the warm-up

COMPILE_SECONDS = 120.0
"""Seconds. Longest time that one frame of the warm-up may take, since it may compile several kernels."""

CHUNK = 512
"""Tokens of a prompt chunk: those of the scheduler's default."""

WIDTHS = (1, 2, 4, 5, 1)
"""Rows of the windows. The widths between them run the same kernels."""

LOGGED_FRAMES = 8
"""Frames from one line of the log to the next."""

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


def warm_up(stage: Stage, *, first: bool, last: bool, expect: Callable[[float], None]) -> None:
    """Run frames of the usual shapes through `stage` and forget them, as the device needs.

    MLX compiles a CUDA kernel from source when it first runs, which takes up to 53 seconds on an H200. On Metal it
    loads or compiles a kernel at its first use too, which takes milliseconds.

    `expect(seconds)` tells the watchdog of the engine thread how long the next frame may take. A frame that fails, for
    example for lack of memory, ends the warm-up; the stage serves all the same.
    """
    batches = this_device().warm_up_batches
    if not batches:
        return
    started = time.monotonic()
    verifier = Verifier(stage.modules, stage.kv_format) if last else None
    engine = StageEngine(stage, epoch=0, first=first, verifier=verifier)
    total = sum(count + len(WIDTHS) + 1 for count in batches)
    try:
        for _ in run_frames(engine, batches):
            if engine.frames_done % LOGGED_FRAMES == 0:
                done = f"{engine.frames_done} of {total} frames"
                log.info("compiling kernels", extra={"done": done})
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
    log.info("kernels compiled", extra={"seconds": round(time.monotonic() - started, 1)})


def run_frames(engine: StageEngine, batches: Sequence[int]) -> Iterator[None]:
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


def _process(engine: StageEngine, ops: tuple[Op, ...], segments: tuple[Segment, ...]) -> dict[int, Outcome]:
    """Let the engine process the next frame. Return the outcomes, without a last stage those of one token a window."""
    frame = Frame(0, engine.frames_done, ops, segments)
    if not engine.first and frame.rows:
        rows = mx.zeros((frame.rows, engine.stage.modules.config.shape.hop_width), engine.stage.dtype)
        frame = frame.with_tensor(*to_bytes(rows))
    usual = (Outcome(s.seq_id, s.window, 1 if s.open else s.width) for s in segments)
    return {o.seq_id: o for o in engine.process(frame).outcomes or usual}
