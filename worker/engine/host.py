"""The host of stages, of a worker or a coordinator that serves alone: it loads and runs them on the engine thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

import mlx.core as mx

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.cut import Cut
from mtp.device import Arithmetic, this_device
from mtp.head.draft_vocabulary import drafted_share
from mtp.layers import mlx_modules
from mtp.layers.communicator import ALONE, Communicator, GroupCommunicator
from mtp.layers.kernel_files import FILES
from proto.errors import MemoryLimitError
from proto.frame import Frame
from proto.frame_stamps import FrameStamps, StampRing
from proto.span import Span
from proto.stage_options import MachineOptions, StageOptions
from proto.state_dir import state_dir
from proto.terminal.progress import OnProgress
from worker.disk.block_index import BlockIndex
from worker.engine import hardware
from worker.engine.engine_thread import EngineThread
from worker.engine.frame_engine import BegunFrame, FrameEngine, may_overlap
from worker.engine.frame_times import GROUP_SECONDS, LONGEST_WAIT, PATIENCE, FrameTimes
from worker.engine.group import JOIN_SECONDS, GroupSpec, join_group, measure_collective
from worker.engine.prefix_disk import StagePrefixes, namespace_of
from worker.engine.stage_state import UNLIMITED, Budget
from worker.engine.warm_up import warm_up
from worker.model.loader import DTYPES, load_stage
from worker.model.stage import StageForward
from worker.model.verifier import Verifier

log = logging.getLogger(__name__)

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
    """A stage of a plan."""

    span: Span
    first: bool
    last: bool
    options: StageOptions = field(default_factory=StageOptions)
    group: GroupSpec | None = None
    """The group of processes that hold the stage together; None for one process."""


@dataclass(frozen=True)
class LoadedStage:
    """A stage in memory. `weight_bytes` is the size of its weights in the files."""

    spec: StageSpec
    stage: StageForward
    weight_bytes: int
    prefixes: StagePrefixes | None = None
    """Its prefixes on disk, None without a folder."""
    collective: float = 0.0
    """Seconds of a sum over the members of its group, 0 for one process."""
    times: FrameTimes = field(default_factory=FrameTimes)


class EngineHost:
    """The parts of a process that successive plans share. Construct it on the event loop that waits for the thread."""

    def __init__(self, disk: BlockIndex | None = None, machine: MachineOptions | None = None) -> None:
        self.thread = EngineThread()
        self.disk = disk
        """The prefixes on disk, None without a folder."""
        self._machine = machine or MachineOptions()
        self.stamps = StampRing()
        """Stamps of the newest frames on the stages."""
        self._times = FrameTimes()
        """The times of the newest engine's stage."""
        self._trimmer = hardware.CacheTrimmer()
        self._stage_prefixes = WeakValueDictionary[int, StagePrefixes]()
        """By id. The prefixes of a former stage stay while they are written."""
        self.thread.on_idle = self._trimmer.clear
        if this_device().backend == "cuda":
            FILES.open(state_dir(self._machine.state) / "kernels")

    # ---- on the engine thread

    def load(
        self,
        open_checkpoint: Callable[[], Checkpoint],
        spec: StageSpec,
        on_progress: OnProgress | None,
        *,
        memory_limit: int | None = None,
        fingerprint: str = "",
    ) -> LoadedStage:
        """Load a stage, after the memory of the one before is released. The watchdog's deadline moves with each part.

        `fingerprint` is that of the whole checkpoint, which a copy of some parts cannot compute.
        Raises MemoryLimitError before any weight is read, and the errors of `open_checkpoint` and `load_stage`.
        """
        expect, options, machine = self.thread.expect, spec.options, self._machine
        expect(PART_SECONDS)
        hardware.release_weights()
        group: GroupCommunicator | None = None
        if spec.group is not None:
            # First, because MLX holds Python's lock until all members have come, and no status is sent meanwhile.
            expect(2 * JOIN_SECONDS)
            group = join_group(spec.group, exact=options.exact)
            expect(PART_SECONDS)
        communicator: Communicator = group or ALONE
        whole = open_checkpoint()
        checkpoint = whole.cut_for(Cut(communicator.rank, communicator.size))
        sizes = checkpoint.part_bytes()
        parts = checkpoint.stage_parts(spec.span, first=spec.first, last=spec.last, with_head=options.with_head)
        weight_bytes = sum(sizes[part] for part in parts)
        if "mtp" in parts:
            unembedding = "embed" if whole.config.tie_word_embeddings else "lm_head"
            rows = drafted_share(options.draft_vocab, whole.config.vocab_size)
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
            hidden, dtype = checkpoint.config.hidden_size, DTYPES[options.dtype or "bfloat16"]
            collective = measure_collective(group, hidden, dtype)
            expect(seconds)
        modules = load_stage(
            whole,
            spec.span,
            first=spec.first,
            last=spec.last,
            dtype=DTYPES[options.dtype] if options.dtype else None,
            with_head=options.with_head,
            on_progress=report,
            communicator=communicator,
            slices=options.slices,
            draft_vocab=options.draft_vocab,
        )
        if spec.last and options.with_head and modules.head is None and checkpoint.mtp.announced:
            log.warning(
                "no MTP: config.json announces a head, but tensors of it are missing",
                extra={"checkpoint": checkpoint.path.name, "missing": len(checkpoint.mtp.missing)},
            )
        hardware.wire_weights(wanted=machine.wired)
        kv_format = checkpoint.config.kv_format(options.kv_bits)
        expect(PROBE_SECONDS if options.exact else TRIAL_SECONDS)
        stage = StageForward(modules, kv_format, exact=options.exact, kernels=machine.kernels, state=machine.state)
        hardware.warn_of_emulated_bfloat16(stage.dtype)
        if FILES.folder is not None:
            expect(mlx_modules.SECONDS + PART_SECONDS)
            tied = modules.embed_tokens if spec.last and modules.lm_head is None else None
            generation = int(mx.device_info()["compute_capability_major"])
            needed = mlx_modules.products_in_use(mlx_modules.objects_of(stage), stage.dtype, generation, tied)
            mlx_modules.compile_missing(FILES.folder, needed)
        if group is not None:  # other members may read their weights from a slower disk
            expect(PROBE_SECONDS + weight_bytes / SLOWEST_DISK)
            mx.eval(group.sum(mx.zeros(1)))
        warm_up(stage, first=spec.first, last=spec.last, expect=expect)
        hardware.trim_allocator()
        prefixes = self._prefixes(fingerprint or whole.fingerprint(), spec, stage)
        return LoadedStage(spec, stage, weight_bytes, prefixes, collective)

    def _prefixes(self, fingerprint: str, spec: StageSpec, stage: StageForward) -> StagePrefixes | None:
        """Return the prefixes of a stage on disk, which for a member of a group are those of its share."""
        if self.disk is None:
            return None
        namespace = namespace_of(
            fingerprint,
            Arithmetic.here(),
            stage.dtype,
            spec.options.kv_bits,
            spec.options.exact,
            spec.options.slices,
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

    def make_engine(self, loaded: LoadedStage, epoch: int, budget: Budget = UNLIMITED) -> FrameEngine:
        """Return an engine without sequences for plan `epoch`."""
        stage, spec, self._times = loaded.stage, loaded.spec, loaded.times
        verifier = Verifier(stage.modules, stage.kv_format) if spec.last else None
        engine = FrameEngine(stage, epoch=epoch, first=spec.first, verifier=verifier, budget=budget)
        engine.disk = loaded.prefixes
        return engine

    def run_frame(
        self, engine: FrameEngine, frame: Frame, stamps: FrameStamps, on_done: OnDone, on_error: OnError
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

    def _runs_ahead(self, engine: FrameEngine, frame: Frame) -> bool:
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


def _begin(engine: FrameEngine, frame: Frame, stamps: FrameStamps) -> BegunFrame | Exception:
    try:
        return engine.begin_frame(frame, stamps)
    except Exception as error:
        return error
