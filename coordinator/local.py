"""A pipeline without sockets: a chain of stages in this process, on one thread that touches MLX.

One of the two composition roots where coordinator and worker meet. `mtp-coord generate`, the single-node
fallback and the tests run on it; the frames, engines and answers are those of the cluster.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from coordinator.budget import DEFAULT_SEQUENCES, Capacity, Room, capacity, reserve_bytes
from coordinator.model_costs import model_costs
from coordinator.pipeline import Pipeline
from mtp.attention import KVFormat
from mtp.checkpoint.checkpoint import Checkpoint
from proto.errors import ClusterError, WorkerLostError
from proto.frame import Frame
from proto.span import Span
from worker.engine import StageEngine
from worker.hardware import default_memory_limit
from worker.model.loader import load_stage
from worker.model.stage import Stage
from worker.model.verifier import Verifier

CLOSE_SECONDS = 10.0
"""Longest wait for the thread to end: one prefill chunk on a slow machine."""


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

    def capacity(self) -> Capacity:
        """What this machine's memory has room for. Raises MemoryLimitError when that is not one sequence."""
        name = None if self.dtype is None else str(self.dtype).removeprefix("mlx.core.")
        costs = model_costs(
            self.checkpoint, dtype=name, kv_bits=self.kv_format.bits, with_head=self.with_head
        )
        whole = Span(0, len(costs.layers))
        weights = sum(layer.weight_bytes for layer in costs.layers)
        weights += costs.embed_bytes + costs.tail_bytes
        limit = default_memory_limit()
        room = Room("this machine", whole, True, limit, weights, reserve_bytes(costs))
        context = self.checkpoint.config.max_positions
        return capacity(costs, [room], context, self.max_sequences, self.prefix_cache)

    def load(self, on_progress: Callable[[int, int], None] | None = None) -> list[Stage]:
        """The stages, in order. Runs on the thread that will compute with them."""
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
                    on_progress=on_progress,
                ),
                self.kv_format,
            )
            for i, span in enumerate(self.spans)
        ]


class LocalPipeline:
    """Implements `coordinator.pipeline.Pipeline` over stages on a thread of its own."""

    def __init__(self, model: LocalModel, epoch: int = 1) -> None:
        self.epoch = epoch
        self.stages = len(model.spans)
        self.capacity = model.capacity()
        self._model = model
        self._inbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._outbox: asyncio.Queue[Frame | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Load the stages. Raises what loading raises."""
        self._on_progress = on_progress
        self._thread.start()
        await self._started

    def send(self, frame: Frame) -> None:
        self._inbox.put(frame)

    async def receive(self) -> Frame:
        result = await self._outbox.get()
        if isinstance(result, Exception):
            self._outbox.put_nowait(result)  # for every later call too
            raise result
        return result

    def rollback(self, seq_id: int, window: int, kept: int, trim: int) -> None:
        """Nothing to tell: on one thread, the next frame's header comes as soon as a signal would."""

    def cancel(self, seq_id: int) -> None:
        """As `rollback`."""

    def fail(self, error: ClusterError) -> None:
        self._outbox.put_nowait(error)

    async def close(self) -> None:
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            # MLX's own threads of this thread must be gone before the process ends, or it aborts now and then.
            mx.clear_streams()

    def _serve(self) -> None:
        try:
            stages = self._model.load(self._on_progress)
        except Exception as error:
            self._post(_set_exception, self._started, error)
            return
        last = stages[-1]
        verifier = Verifier(last.modules, last.kv_format)
        engines = [
            StageEngine(
                stage,
                epoch=self.epoch,
                first=i == 0,
                verifier=verifier if stage is last else None,
            )
            for i, stage in enumerate(stages)
        ]
        self._post(_set_result, self._started)
        while (frame := self._inbox.get()) is not None:
            try:
                for engine in engines:
                    frame = engine.process(frame)
            except ClusterError as error:
                self._post(self._outbox.put_nowait, error)
                return
            except Exception as error:
                lost = WorkerLostError(f"the engine failed: {type(error).__name__}: {error}")
                lost.__cause__ = error
                self._post(self._outbox.put_nowait, lost)
                return
            self._post(self._outbox.put_nowait, frame)

    def _post(self, function: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


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


def _set_result(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _set_exception(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
