"""The host of stages, of a worker or a coordinator that serves alone: it loads and runs them on the engine thread.

A stage may be held by a group of processes. MLX keeps a backend until its process ends. So a process joins one group,
and a worker starts a new process for each.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import mlx.core as mx

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.cut import Cut
from mtp.device import Arithmetic, this_device
from mtp.layers.communicator import ALONE, Communicator, GroupCommunicator
from proto.control import Backend, Kernels
from proto.errors import MemoryLimitError, NotReadyError, UsageError
from proto.frame import Admit, Commit, Evict, Frame, Op, Outcome, Segment
from proto.frame_stamps import FrameStamps, StampRing
from proto.params import SamplingParams
from proto.span import Span
from proto.terminal.progress import OnProgress
from worker.engine import hardware
from worker.engine.engine_thread import EngineThread
from worker.engine.prefix_disk import PrefixDisk, StagePrefixes, namespace_of
from worker.engine.stage_engine import BegunFrame, Budget, StageEngine, to_bytes
from worker.model.loader import DTYPES, load_stage
from worker.model.stage import Stage
from worker.model.verifier import Verifier

log = logging.getLogger(__name__)

JOIN_SECONDS = 30.0
"""Seconds. Bound of the wait for the other members, which start at the same time."""


@dataclass(frozen=True)
class GroupSpec:
    """The place `rank` among the `hosts` of a group, host:port of each member, and for jaccl their RDMA devices."""

    rank: int
    hosts: tuple[str, ...]
    backend: Backend = Backend.ring
    rdma: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.hosts) < 2 or not 0 <= self.rank < len(self.hosts):
            raise UsageError(f"member {self.rank} of a group of {len(self.hosts)} does not exist")
        if self.backend is Backend.jaccl and not (len(self.hosts) == len(self.rdma) == 2):
            raise UsageError("jaccl joins two machines, each with its RDMA device")

    def environment(self, file: Path) -> dict[str, str]:
        """Return the variables with which MLX forms the group, and write what they name to `file`."""
        host, _, port = self.hosts[0].rpartition(":")
        rank = {"MLX_RANK": str(self.rank)}
        if self.backend is Backend.ring:
            file.write_text(json.dumps([[host] for host in self.hosts]))
            return rank | {"MLX_HOSTFILE": str(file)}
        if self.backend is Backend.jaccl:
            own, other = self.rdma
            file.write_text(json.dumps([[None, own], [other, None]]))
            return rank | {"MLX_IBV_DEVICES": str(file), "MLX_JACCL_COORDINATOR": self.hosts[0]}
        size = str(len(self.hosts))
        return rank | {"MLX_WORLD_SIZE": size, "NCCL_HOST_IP": host.strip("[]"), "NCCL_PORT": port}


def join_group(spec: GroupSpec, *, exact: bool) -> GroupCommunicator:
    """Join the group and return the communicator. Raises NotReadyError if it cannot be formed.

    Blocks until all members have come, and ends the process after JOIN_SECONDS. It can join no other group later.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ |= spec.environment(Path(folder) / "group.json")
            # MLX holds Python's lock while it waits for the others, so only a thread outside Python can end the wait.
            faulthandler.dump_traceback_later(JOIN_SECONDS, exit=True)
            try:
                group = mx.distributed.init(strict=True, backend=spec.backend.value)
            finally:
                faulthandler.cancel_dump_traceback_later()
    except (RuntimeError, ValueError) as error:
        raise NotReadyError(
            f"the group of {', '.join(spec.hosts)} cannot be formed by {spec.backend.value}: {error}{_advice(error)}"
        ) from error
    if (group.rank(), group.size()) != (spec.rank, len(spec.hosts)):
        raise NotReadyError(
            f"the group has {group.size()} members, {len(spec.hosts)} were expected. Restart the worker."
        )
    return GroupCommunicator(group, exact=exact)


_RDMA_ADVICE = {
    "2": "This Mac has no such RDMA device. Turn RDMA on in macOS Recovery with `rdma_ctl enable`, and see --rdma",
    "16": "The device has no queue pair left. Restart this Mac",
    "22": "Take the port out of the Thunderbolt Bridge, and compare --rdma on both Macs with `ibv_devinfo`",
    "60": "The other Mac does not answer on this cable. Compare --rdma on both Macs, and use one cable for the pair",
}
"""The advice for the error numbers that users of jaccl report (issues 3207, 3467 and 4209 of MLX)."""


def _advice(error: Exception) -> str:
    """Return a sentence for an error of jaccl that has a known cause, or an empty string."""
    number = re.search(r"\berrno (\d+)", str(error))
    advice = _RDMA_ADVICE.get(number[1]) if number and "[jaccl]" in str(error) else None
    return f". {advice}" if advice else ""


CHAIN = 32
"""Sums in a row of one measurement. Each needs the result of the one before, as in a pass through the layers."""


def measure_collective(communicator: GroupCommunicator, hidden: int, dtype: mx.Dtype) -> float:
    """Return the seconds of one sum of `[1, hidden]` in a chain. Every member must call it at the same place."""
    ones = mx.ones((1, hidden), dtype)
    taken = 0.0
    for _ in range(2):  # the first one compiles kernels
        x, started = ones, time.perf_counter()
        for _ in range(CHAIN):
            x = communicator.sum(x) * (1 / communicator.size)
        mx.eval(x)
        taken = time.perf_counter() - started
    return taken / CHAIN


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
    rows beside it, and each layer is computed in `slices`.
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


class StageHost:
    """The parts of a process that successive plans share. Construct it on the event loop that waits for the thread."""

    def __init__(self, disk: PrefixDisk | None = None) -> None:
        self.thread = EngineThread()
        self.disk = disk
        """The folder of prefixes on disk, None without one."""
        self.stamps = StampRing()
        """Stamps of the newest frames on the stages."""
        self._deadlines = DeadlineEstimate(this_device().compile_seconds)
        self._trimmer = hardware.CacheTrimmer()
        self._stage_prefixes: list[StagePrefixes] = []
        self._usual = 0.0
        """Seconds that the newest finished frame took."""
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
    ) -> LoadedStage:
        """Load a stage, after the memory of the one before is released. The watchdog's deadline moves with each part.

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
        parts = checkpoint.stage_parts(
            spec.span, first=spec.first, last=spec.last, with_head=spec.mtp
        )
        weight_bytes = sum(sizes[part] for part in parts)
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
            hidden, dtype = checkpoint.config.hop_width, DTYPES[spec.dtype or "bfloat16"]
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
        )
        if spec.last and spec.mtp and modules.head is None and checkpoint.mtp.announced:
            log.warning(
                "no MTP: config.json announces a head, but tensors of it are missing",
                extra={"checkpoint": checkpoint.path.name, "missing": len(checkpoint.mtp.missing)},
            )
        hardware.wire_weights(wanted=wired)
        kv_format = checkpoint.config.kv_format(spec.kv_bits)
        expect(PROBE_SECONDS if spec.exact else TRIAL_SECONDS)
        stage = Stage(modules, kv_format, exact=spec.exact, kernels=kernels)
        hardware.warn_of_emulated_bfloat16(stage.dtype)
        if group is not None:  # other members may read their weights from a slower disk
            expect(PROBE_SECONDS + weight_bytes / SLOWEST_DISK)
            mx.eval(group.sum(mx.zeros(1)))
        warm_up(stage, first=spec.first, last=spec.last, expect=expect)
        hardware.trim_allocator()
        prefixes = self._prefixes(whole, spec, stage, kernels)
        return LoadedStage(spec, stage, weight_bytes, prefixes, collective)

    def _prefixes(
        self, checkpoint: Checkpoint, spec: StageSpec, stage: Stage, kernels: Kernels
    ) -> StagePrefixes | None:
        """Return the prefixes of a stage on disk, which for a member of a group are those of its share."""
        index = self.disk.open() if self.disk is not None else None
        if index is None:
            return None
        namespace = namespace_of(
            checkpoint.fingerprint(),
            Arithmetic.here(),
            stage.dtype,
            spec.kv_bits,
            spec.exact,
            spec.slices,
            kernels,
            *(() if spec.group is None else (spec.group.rank, len(spec.group.hosts))),
        )
        # The MTP head counts as a layer after the last one.
        end = spec.span.end + (spec.last and stage.modules.head is not None)
        prefixes = StagePrefixes(index, namespace, Span(spec.span.start, end), self.thread)
        self._stage_prefixes.append(prefixes)
        return prefixes

    async def close(self) -> None:
        """End the writing of prefixes, and the engine thread."""
        await asyncio.gather(*(one.close() for one in self._stage_prefixes))
        await self.thread.close()

    def make_engine(
        self, loaded: LoadedStage, epoch: int, budget: Budget | None = None
    ) -> StageEngine:
        """Return an engine without sequences for plan `epoch`."""
        stage, spec = loaded.stage, loaded.spec
        verifier = Verifier(stage.modules, stage.kv_format) if spec.last else None
        engine = StageEngine(stage, epoch=epoch, first=spec.first, verifier=verifier, budget=budget)
        engine.disk = loaded.prefixes
        return engine

    @contextmanager
    def timed(self, frame: Frame) -> Iterator[None]:
        """Watch a frame that runs inside the block, and learn its time."""
        self.thread.expect(self._deadlines.seconds(frame))
        started = time.monotonic()
        yield
        self._deadlines.record_frame_time(frame, time.monotonic() - started)
        self._trimmer.record_frame(frame)

    def run_frame(
        self,
        engine: StageEngine,
        frame: Frame,
        stamps: FrameStamps,
        on_done: OnDone,
        on_error: OnError,
    ) -> None:
        """Begin `frame`. Call `on_done` or `on_error` now, or when the next one has come. A failed engine runs none."""
        least = GROUP_SECONDS if engine.group.size > 1 else 0.0
        seconds = max(self._deadlines.seconds(frame), least)
        self.thread.expect(seconds)
        if not (frame.continues and engine.can_run_ahead(frame)):
            self.thread.run_deferred(partial(engine.stage.expect_chunks, frame.segments))
            if engine.failed:
                return
            self.thread.expect(seconds)
        begun = _begin(engine, frame, stamps)
        del engine  # after a failure no thread may keep its weights in memory
        self.thread.run_deferred()
        if isinstance(begun, Exception):
            on_error(begun)
            return
        finish = partial(self._finish_frame, begun, seconds, on_done, on_error)
        queued, engine = self.thread.queued, begun.engine
        runs_ahead = (frame.continues or queued) and engine.can_run_ahead(frame)
        chunks_only = not any(segment.open for segment in frame.segments)
        if runs_ahead or (queued and chunks_only and engine.stage.token_layers):
            self.thread.defer(finish, min(LONGEST_WAIT, PATIENCE * self._usual))
        else:
            finish()

    def _finish_frame(
        self, begun: BegunFrame, seconds: float, on_done: OnDone, on_error: OnError
    ) -> None:
        try:
            self.thread.expect(seconds)
            out = begun.finish_frame()
            on_done(out)
            self._usual = out.stage_us[-1] / 1e6
            self._deadlines.record_frame_time(out, self._usual)
            begun.clean_up()
        except Exception as error:
            begun.engine.failed = True
            on_error(error)
            return
        self._trimmer.record_frame(out)


def _begin(engine: StageEngine, frame: Frame, stamps: FrameStamps) -> BegunFrame | Exception:
    try:
        return engine.begin_frame(frame, stamps)
    except Exception as error:
        return error


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
        for end, count in zip(accumulate(self._batches), self._batches, strict=True):
            yield from self._run_batch(range(end - count, end))

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

    MLX compiles a CUDA kernel from source when it first runs, which takes up to 53 seconds on an H200. On Metal it
    loads or compiles a kernel at its first use too, which takes milliseconds. Otherwise the first clients would wait.

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
