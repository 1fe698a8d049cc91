"""A pipeline without sockets: a chain of stages in this process, on one thread that touches MLX.

One of the two composition roots where coordinator and worker meet. `mtp-coord generate`, the single-node
fallback and the tests run on it; the frames, engines and answers are those of the cluster.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from coordinator.pipeline.base import Pipeline
from coordinator.planning.capacity import DEFAULT_SEQUENCES, Capacity, whole_model_capacity
from coordinator.planning.model_costs import model_costs
from coordinator.status.cluster_status import NodeStatus
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.head.attention import KVFormat
from proto.errors import ClusterError, NotReadyError, WorkerLostError
from proto.frame import Frame
from proto.span import Span
from proto.terminal.progress_bar import OnProgress, byte_bar
from worker.engine.deadline import DeadlineEstimate
from worker.engine.engine_thread import EngineThread
from worker.engine.hardware import compile_seconds, default_memory_limit
from worker.engine.memory import CacheTrimmer, release_weights, set_limits, wire_weights
from worker.engine.stage_engine import StageEngine
from worker.model.loader import load_stage
from worker.model.stage import Stage
from worker.model.verifier import Verifier
from worker.node.loading import part_seconds

log = logging.getLogger(__name__)

STUCK_SECONDS = 60.0
"""For so long the engine may be late before its answers end with an error. Longer than a worker may: nobody else could
go on with them, and a machine that swaps may still get there."""

WATCH_SECONDS = 0.5

STUCK = "the engine of this process has been stuck for"


@dataclass(frozen=True)
class LocalModel:
    """What to load: a checkpoint cut into `spans`, with or without its head."""

    checkpoint: Checkpoint
    spans: Sequence[Span]
    dtype: mx.Dtype | None = None
    kv_format: KVFormat = field(default_factory=KVFormat)
    with_head: bool = True
    max_sequences: int = DEFAULT_SEQUENCES
    prefix_cache: bool = True
    wired: bool = True

    def capacity(self, reserved: int = 0) -> Capacity:
        """What this machine's memory less `reserved` bytes has room for. Raises MemoryLimitError when that is not one sequence."""
        name = None if self.dtype is None else str(self.dtype).removeprefix("mlx.core.")
        costs = model_costs(
            self.checkpoint, dtype=name, kv_bits=self.kv_format.bits, with_head=self.with_head
        )
        return whole_model_capacity(
            costs,
            "this machine",
            default_memory_limit() - reserved,
            self.checkpoint.config.max_positions,
            self.max_sequences,
            self.prefix_cache,
        )

    def load(
        self, expect: Callable[[float], None], on_progress: OnProgress | None = None
    ) -> list[Stage]:
        """The stages, in order. Runs on the thread that will compute with them, whose watchdog `expect(seconds)` tells
        what the next part may take."""
        seconds = part_seconds(max(self.checkpoint.part_bytes().values()))
        expect(seconds)

        def report(done: int, total: int) -> None:
            expect(seconds)
            if on_progress is not None:
                on_progress(done, total)

        last = len(self.spans) - 1
        return [
            Stage(
                load_stage(
                    self.checkpoint,
                    span,
                    first=i == 0,
                    last=i == last,
                    dtype=self.dtype,
                    with_head=self.with_head,
                    on_progress=report,
                ),
                self.kv_format,
            )
            for i, span in enumerate(self.spans)
        ]


class LocalPipeline:
    """Implements `coordinator.pipeline.base.Pipeline` over stages on a thread of its own. Made on the event loop.

    Raises MemoryLimitError, before anything is read, for a model that does not fit.
    """

    def __init__(self, model: LocalModel, epoch: int = 1, *, reserved: int = 0) -> None:
        self.epoch = epoch
        self.stages = len(model.spans)
        self.capacity = model.capacity(reserved)
        self._memory_limit = default_memory_limit() - reserved
        self._cache_trimmer = CacheTrimmer()
        self.thread = EngineThread()
        self.thread.on_idle = self._cache_trimmer.clear_if_idle
        self._model = model
        self._deadline_estimate = DeadlineEstimate(compile_seconds())
        self._engines: list[StageEngine] = []
        self._outbox: asyncio.Queue[Frame | ClusterError] = asyncio.Queue()
        self._watchdog: asyncio.Task[ClusterError] | None = None

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Load the stages. Raises a ClusterError, whatever loading raised, and WorkerLostError when it gets stuck."""
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
            raise _lost("the model could not be loaded", error) from error

    def _load(self, on_progress: OnProgress | None) -> None:
        """On the engine thread."""
        set_limits(self._memory_limit)
        release_weights()
        stages = self._model.load(self.thread.expect, on_progress)
        wire_weights(wanted=self._model.wired)
        last = stages[-1]
        verifier = Verifier(last.modules, last.kv_format)
        self._engines = [
            StageEngine(
                stage,
                epoch=self.epoch,
                first=i == 0,
                verifier=verifier if stage is last else None,
            )
            for i, stage in enumerate(stages)
        ]

    async def _watch(self) -> ClusterError:
        """Fail when the engine has been stuck for too long."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if (stall := self.thread.stall) >= STUCK_SECONDS:
                log.error("the engine of this process is stuck", extra={"seconds": stall})
                error = WorkerLostError(f"{STUCK} {stall:.0f} s")
                self.fail(error)
                return error

    def send(self, frame: Frame) -> None:
        self.thread.submit(partial(self._process, frame))

    def _process(self, frame: Frame) -> None:
        """On the engine thread."""
        if not self._engines:
            return  # an earlier frame has failed
        started = time.monotonic()
        self.thread.expect(self._deadline_estimate.seconds(frame))
        result: Frame | ClusterError
        try:
            result = self._chain(frame)
        except Exception as error:
            self._engines = []
            if not isinstance(error, ClusterError):
                log.exception("engine failed")
            told = error if isinstance(error, ClusterError) else _lost("the engine failed", error)
            result = _without_frames(told)
        else:
            self._deadline_estimate.observe(frame, time.monotonic() - started)
        # Not from within `except`: until its end, the error there leads to the engine.
        self.thread.post(self._outbox.put_nowait, result)
        self._cache_trimmer.record_frame(frame)

    def _chain(self, frame: Frame) -> Frame:
        """Through every stage. A call of its own: once it has failed, no variable holds an engine."""
        for engine in self._engines:
            frame = engine.process(frame)
        return frame

    async def receive(self) -> Frame:
        result = await self._outbox.get()
        if isinstance(result, ClusterError):
            self._outbox.put_nowait(result)  # for every later call too
            raise result
        return result

    def rollback(self, seq_id: int, window: int, accepted_length: int, trim: int) -> None:
        """Nothing to tell: on one thread, the next frame's header comes as soon as a signal would."""

    def cancel(self, seq_id: int) -> None:
        """As `rollback`."""

    def fail(self, error: ClusterError) -> None:
        self._outbox.put_nowait(error)

    async def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self.thread.submit(self._drop_engines)
        await self.thread.close()

    def _drop_engines(self) -> None:
        """On the engine thread."""
        self._engines = []
        release_weights()


class LocalPipelines:
    """Makes the pipelines of this process, one after the other: two at once would need the memory twice."""

    def __init__(self, model: LocalModel) -> None:
        self.model = model
        self.reserved_bytes: Callable[[], int] = lambda: 0
        """Returns the bytes that workers on this machine use. A pipeline leaves them free."""
        self._last: LocalPipeline | None = None

    def status(self) -> NodeStatus:
        """This process among the cluster's machines, while it serves alone."""
        return NodeStatus(
            "this process",
            span=str(Span(self.model.spans[0].start, self.model.spans[-1].end)),
            health="ready",
            memory_used=mx.get_active_memory(),
            memory_limit=default_memory_limit(),
        )

    async def make(self, epoch: int, on_progress: OnProgress | None = None) -> LocalPipeline:
        """A pipeline that is ready. Progress is shown where nobody takes it.

        Raises NotReadyError while an earlier one is stuck, and what starting raises.
        """
        if self._last is not None:
            await self._ended(self._last.thread)
            self._last = None
            gc.collect()  # whatever still points to the weights
        pipeline = self._last = LocalPipeline(
            self.model, epoch, reserved=self.reserved_bytes()
        )
        if on_progress is not None:
            await pipeline.start(on_progress)
            return pipeline
        with byte_bar("loading the model", log) as show:
            await pipeline.start(show)
        return pipeline

    async def _ended(self, thread: EngineThread) -> None:
        """Wait for a thread that finishes its work. Raises NotReadyError for one that is stuck."""
        while thread.alive:
            await thread.close()
            if (stall := thread.stall) > 0:
                raise NotReadyError(f"{STUCK} {stall:.0f} s: wait, or restart mtp-coord")


class LocalSource:
    """Gives the pipeline of this process, loaded by `make(epoch)`, and a fresh one when that has failed."""

    def __init__(self, make: Callable[[int], Awaitable[LocalPipeline]]) -> None:
        self._make = make
        self._epoch = 0

    async def acquire(self) -> Pipeline:
        self._epoch += 1
        return await self._make(self._epoch)

    def failed(self, pipeline: Pipeline, error: Exception) -> None:
        """Nothing to find out: there is no other machine to leave out."""


def _without_frames(error: ClusterError) -> ClusterError:
    """The error alone: the frames that it came through, and those of what caused it, hold the engine and its weights
    while the next is loaded."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _lost(what: str, error: Exception) -> WorkerLostError:
    return WorkerLostError(f"{what}: {type(error).__name__}: {error}")
