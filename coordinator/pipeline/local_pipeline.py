"""A pipeline without sockets: one stage with all layers in this process, on one thread that touches MLX.

`mtp-coord generate`, the single-node fallback and the tests use it. Its frames, engine and answers are those of the
cluster.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import mlx.core as mx

from coordinator.pipeline.pipeline import Pipeline, PipelineSource, longest_prefix
from coordinator.planning.capacity import DEFAULT_SEQUENCES, Capacity, model_costs, plan_capacity
from coordinator.planning.plan import StagePlan
from coordinator.status.cluster_status import NodeStatus
from coordinator.status.frame_trace import COORDINATOR, ProcessTrace, process_trace
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.device import FrameLimits
from mtp.vision.tower import tower_bytes
from proto.backup import LayerState, ReceivedStates
from proto.errors import ClusterError, NotReadyError, WorkerLostError
from proto.frame import Frame
from proto.frame_stamps import CoordinatorStep, FrameStamps, StageStep, StampRing
from proto.span import Span
from proto.stage_options import MachineOptions, StageOptions
from proto.terminal.progress import OnProgress, byte_bar
from worker.disk.block_index import BlockIndex
from worker.engine.frame_engine import FrameEngine
from worker.engine.hardware import default_memory_limit, own_version, release_weights, set_limits
from worker.engine.host import EngineHost, StageSpec
from worker.engine.prefix_disk import StagePrefixes, open_index
from worker.engine.stage_backups import ReceivedBackup

log = logging.getLogger(__name__)

STUCK_SECONDS = 60.0
"""Seconds by which the engine may exceed its deadline, as no other machine could go on, and swapping may end."""

WATCH_SECONDS = 0.5
"""Seconds. Interval at which the watchdog looks at the engine."""

STUCK = "the engine of this process has been stuck for"


@dataclass(frozen=True)
class LocalModel:
    """The model to load, and how."""

    checkpoint: Checkpoint
    options: StageOptions = field(default_factory=StageOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)
    max_sequences: int = DEFAULT_SEQUENCES
    prefix_cache: bool = True
    vision: bool = False
    """True if the vision tower takes memory beside the layers."""
    other_bytes: int = 0
    """Memory that another process of this server takes."""

    @property
    def span(self) -> Span:
        """All layers."""
        return Span(0, self.checkpoint.config.num_layers)

    def capacity(self, reserved: int = 0) -> Capacity:
        """Return what fits beside `reserved` bytes and the vision tower. Raises MemoryLimitError without room."""
        o = self.options
        costs = model_costs(
            self.checkpoint, dtype=o.dtype, kv_bits=o.kv_bits, with_head=o.with_head, draft_vocab=o.draft_vocab
        )
        # A large image needs about as much for its activations.
        vision = 2 * tower_bytes(self.checkpoint) if self.vision else 0
        limit = default_memory_limit() - reserved - self.other_bytes - vision
        weights = sum(layer.weight_bytes for layer in costs.layers)
        weights += costs.embed_bytes + costs.last_stage_bytes
        context = self.checkpoint.config.max_positions
        whole = StagePlan("this machine", self.span, True, True, weights, 0, limit, 0.0)
        return plan_capacity(costs, [whole], context, self.max_sequences, self.prefix_cache)

    def spec(self) -> StageSpec:
        """Return the stage with all layers."""
        return StageSpec(self.span, True, True, self.options)


class LocalPipeline(Pipeline):
    """A `Pipeline` over a stage on a thread of its own. The constructor raises MemoryLimitError for a large model."""

    def __init__(self, model: LocalModel, epoch: int = 1, *, reserved: int = 0, disk: BlockIndex | None = None) -> None:
        self.epoch = epoch
        self.stages = 1
        self.capacity = model.capacity(reserved)
        self._memory_limit = default_memory_limit() - reserved - model.other_bytes
        self.suspect: str | None = None
        """Always None: no worker takes part."""
        self.makes_backups = False
        self.frame_limits = FrameLimits.here(sparse=model.checkpoint.config.num_experts > 0)
        self.stamps = StampRing()
        self.host = EngineHost(disk, model.machine)
        self.thread = self.host.thread
        self.thread.on_failure = partial(self._engine_failed, FrameStamps(COORDINATOR, CoordinatorStep))
        self._model = model
        self._engine: FrameEngine | None = None
        self.layers = ""
        """The variants of the layers, for people."""
        self._outbox: asyncio.Queue[Frame | ClusterError] = asyncio.Queue()
        self._watchdog: asyncio.Task[ClusterError] | None = None

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Load the stage. Raises a ClusterError for any failure, and WorkerLostError if the engine is stuck."""
        load = asyncio.create_task(self.thread.call(partial(self._load, on_progress)))
        self._watchdog = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({load, self._watchdog}, return_when=asyncio.FIRST_COMPLETED)
            if not load.done():
                raise self._watchdog.result()
            await load
        except BaseException as error:
            load.cancel()
            await self.close()
            if isinstance(error, ClusterError) or not isinstance(error, Exception):
                raise
            raise _worker_lost("loading the model failed", error) from error

    def _load(self, on_progress: OnProgress | None) -> None:
        set_limits(self._memory_limit)
        model = self._model
        loaded = self.host.load(lambda: model.checkpoint, model.spec(), on_progress)
        self._engine = self.host.make_engine(loaded, self.epoch)
        self.layers = loaded.stage.variants.summary

    async def _watch(self) -> ClusterError:
        """Fail the pipeline when the engine is stuck for STUCK_SECONDS, or when its thread has ended."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            alive = self.thread.alive
            if (stall := self.thread.stall) >= STUCK_SECONDS or not alive:
                log.error("the engine of this process is stuck", extra={"seconds": stall, "alive": alive})
                error = WorkerLostError(f"{STUCK} {stall:.0f} s" if alive else "the engine of this process has ended")
                self.fail(error)
                return error

    def send_frame(self, frame: Frame) -> None:
        own = self.stamps.add_frame(COORDINATOR, CoordinatorStep)
        stamps = self.host.stamps.add_frame(0, StageStep)
        for one in (own, stamps):
            one.name_frame(frame.epoch, frame.number, frame.rows)
        self.thread.submit_frame(partial(self._process, frame, own, stamps))

    def _process(self, frame: Frame, own: FrameStamps, stamps: FrameStamps) -> None:
        if self._engine is None:
            return  # an earlier frame has failed
        done = partial(self.thread.post, self._queue_result, own)
        failed = partial(self._engine_failed, own)
        stamps.mark(StageStep.STARTED)
        self.host.run_frame(self._engine, frame, stamps, done, failed)

    def _engine_failed(self, own: FrameStamps, error: Exception) -> None:
        """Drop the engine after an invalid frame, a bug or a lack of memory. Runs on the engine thread."""
        if self._engine is not None:
            self._engine.failed = True  # it may have begun a frame
        self._engine = None
        if not isinstance(error, ClusterError):
            log.error("engine failed", exc_info=error)
            error = _worker_lost("the engine failed", error)
        # The frames of a traceback and of a cause would keep the engine and its weights.
        error.__cause__ = error.__context__ = None
        self.thread.post(self._queue_result, own, error.with_traceback(None))

    def _queue_result(self, own: FrameStamps, result: Frame | ClusterError) -> None:
        own.mark(CoordinatorStep.RECEIVED)
        self._outbox.put_nowait(result)

    async def receive_frame(self) -> Frame:
        result = await self._outbox.get()
        if isinstance(result, ClusterError):
            self._outbox.put_nowait(result)  # every later call raises it too
            raise result
        return result

    async def collect_trace(self, window_ns: int) -> list[ProcessTrace]:
        since_ns = self.stamps.newest_ns() - window_ns
        own = process_trace("coordinator", COORDINATOR, self.stamps.since(since_ns))
        return [own, process_trace("stage 0", 0, self.host.stamps.since(since_ns))]

    async def read_backup(self, seq_id: int, limit: int) -> ReceivedStates:
        """Raise NotReadyError: when this process ends, so do its backups."""
        raise NotReadyError("a pipeline of this process makes no backups")

    async def write_backup(self, seq_id: int, tokens: Sequence[int], states: Sequence[LayerState]) -> None:
        for part in ReceivedBackup.of(tokens, states).in_parts():
            await self._receive_backup(seq_id, part)

    async def _receive_backup(self, seq_id: int, backup: ReceivedBackup) -> None:
        if self._engine is not None:
            await self.thread.call(partial(self._engine.receive_backup, seq_id, backup))

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    async def find_prefix(self, tokens: Sequence[int]) -> int:
        return 0 if self._disk is None else longest_prefix([await self._disk.find(tokens)])

    async def load_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        if self._disk is not None:
            async for part in self._disk.load(tokens):
                await self._receive_backup(seq_id, part)

    @property
    def _disk(self) -> StagePrefixes | None:
        return None if self._engine is None else self._engine.disk

    def fail(self, error: ClusterError) -> None:
        self._outbox.put_nowait(error)

    async def close(self) -> None:
        """Stop the watchdog and the engine thread, and free the weights."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self.thread.submit(self._drop_engine)
        await self.host.close()

    def _drop_engine(self) -> None:
        """Free the engine on the engine thread."""
        if self._engine is not None:
            self._engine.end_plan()
        self._engine = None
        release_weights()


class LocalPipelines(PipelineSource):
    """A source of pipelines of this process. It makes one at a time, because two would need the memory twice."""

    def __init__(
        self,
        model: LocalModel,
        state: Path | None = None,
        prefix_disk: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.model = model
        self.on_progress = on_progress
        self._epoch = 0
        self.disk = open_index(state, prefix_disk)
        self.reserved_bytes: Callable[[], int] = lambda: 0
        """Returns the bytes that workers on this machine use. A pipeline leaves them free."""
        self._last: LocalPipeline | None = None

    def status(self) -> NodeStatus:
        """Return the status of this process while it serves alone."""
        return NodeStatus(
            "this process",
            span=str(self.model.span),
            layers="" if self._last is None else self._last.layers,
            health="ready",
            memory_used=mx.get_active_memory(),
            memory_cached=mx.get_cache_memory(),
            memory_limit=default_memory_limit(),
            version=own_version(),
        )

    async def make(self, epoch: int) -> LocalPipeline:
        """Return a ready pipeline. Show the progress without `on_progress`. Raises NotReadyError while one is stuck."""
        if self._last is not None:
            thread = self._last.thread
            while thread.alive:
                await thread.close()
                if (stall := thread.stall) > 0:
                    raise NotReadyError(f"{STUCK} {stall:.0f} s. Wait, or restart mtp-coord")
            self._last = None
            gc.collect()  # frees the weights of reference cycles
        pipeline = self._last = LocalPipeline(self.model, epoch, reserved=self.reserved_bytes(), disk=self.disk)
        if self.on_progress is not None:
            await pipeline.start(self.on_progress)
            return pipeline
        with byte_bar("loading the model", log) as show:
            await pipeline.start(show)
        return pipeline

    async def acquire(self) -> Pipeline:
        self._epoch += 1
        return await self.make(self._epoch)


def _worker_lost(what: str, error: Exception) -> WorkerLostError:
    return WorkerLostError(f"{what}: {type(error).__name__}: {error}")
