"""The stage bound into one plan: its engine, its hop to the next stage, its results. Ends with the plan."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from proto import cluster_pb2 as pb
from proto.control import Cancel, Rollback, Signal
from proto.errors import (
    AccessError,
    ClusterError,
    NotReadyError,
    ProtocolError,
    StaleEpochError,
)
from proto.frame import Frame, decode, encode
from proto.rpc.background_tasks import BackgroundTasks
from proto.rpc.data_plane import StreamBinding
from proto.rpc.link import Link
from worker.engine.deadline import DeadlineEstimate
from worker.engine.engine_thread import EngineThread
from worker.engine.hardware import compile_seconds
from worker.engine.memory import CacheTrimmer
from worker.engine.stage_engine import StageEngine

log = logging.getLogger(__name__)

MAX_QUEUED_FRAMES = 256
MAX_QUEUED_BYTES = 2**30
"""More than this waits for the engine only if the sender ignores what is in flight."""


@dataclass
class Traffic:
    """Counters of the data plane, for as long as the process lives."""

    bytes_in: int = 0
    messages_in: int = 0
    bytes_out: int = 0
    messages_out: int = 0
    rows: int = 0
    skipped: int = 0


@dataclass
class Tally:
    """Frames and bytes counted so far."""

    frames: int = 0
    nbytes: int = 0

    def count(self, data: bytes) -> None:
        self.frames += 1
        self.nbytes += len(data)


@dataclass
class Machinery:
    """What a worker has one of, and every plan uses in its turn."""

    thread: EngineThread = field(default_factory=EngineThread)
    allowance: DeadlineEstimate = field(default_factory=lambda: DeadlineEstimate(compile_seconds()))
    traffic: Traffic = field(default_factory=Traffic)
    cache_trimmer: CacheTrimmer = field(default_factory=CacheTrimmer)

    def __post_init__(self) -> None:
        self.thread.on_idle = self.cache_trimmer.clear_if_idle


@dataclass(frozen=True)
class Place:
    """A stage's place in a plan."""

    epoch: int
    stage: int
    num_stages: int
    token: bytes

    @property
    def last(self) -> bool:
        return self.stage == self.num_stages - 1


class Binding:
    """Made on the event loop, which is where its methods run unless they say otherwise.

    `on_failure` is called once when the plan cannot go on here, unless it has ended before.
    """

    def __init__(self, place: Place, machinery: Machinery, on_failure: Callable[[], None]) -> None:
        self.place = place
        self.thread = machinery.thread
        self.allowance = machinery.allowance
        self.traffic = machinery.traffic
        self._cache_trimmer = machinery.cache_trimmer
        self.engine: StageEngine | None = None
        self.link: Link | None = None
        self.results: asyncio.Queue[bytes | ClusterError] = asyncio.Queue()
        self.fault: pb.Fault | None = None
        self.bound = False
        """Whether frames may come."""
        self._came, self._begun = Tally(), Tally()
        """Frames taken here and those the engine has begun: each counted by one thread alone."""
        self._closed = False
        self._on_failure = on_failure

    # ---- beginning and end

    async def open(
        self, make_engine: Callable[[], StageEngine], request: pb.ConnectRequest, worker_id: str
    ) -> float:
        """Open the hop, make the engine on its thread. Returns the hop's round trip in seconds, 0 without one.

        Raises StaleEpochError when the plan ends meanwhile, and what opening the hop raises.
        """
        seconds = 0.0
        if request.next_address:
            self.link = self._link(request, worker_id)
            seconds = await self.link.open()
        await self.thread.call(partial(self._take_engine, make_engine))
        if self._closed:
            raise StaleEpochError(f"plan {self.place.epoch} ended while it was being connected")
        self.bound = True
        return seconds

    def _link(self, request: pb.ConnectRequest, worker_id: str) -> Link:
        place = self.place
        return Link(
            request.next_address,
            StreamBinding(place.epoch, place.stage + 1, worker_id, place.token),
            timeout=request.hop_timeout_ms / 1000,
            on_failure=lambda error: self._fail(
                pb.FAULT_KIND_LINK, str(error), request.next_worker_id
            ),
        )

    def _take_engine(self, make_engine: Callable[[], StageEngine]) -> None:
        """On the engine thread."""
        if not self._closed:
            self.engine = make_engine()

    def close(self) -> None:
        """The plan has ended: what is still on its way for it is dropped, what its sequences hold is freed."""
        self._closed = True
        self.bound = False
        self.thread.submit(self._drop_engine)
        if self.link is not None:
            _background.spawn(self.link.close())
        self.results.put_nowait(StaleEpochError("this plan has ended"))

    def _drop_engine(self) -> None:
        """On the engine thread."""
        self.engine = None
        mx.clear_cache()

    def _fail(self, kind: pb.FaultKind.ValueType, message: str, peer: str = "") -> None:
        """The plan cannot go on here. The coordinator hears of it by pulse and by the end of the results."""
        if self._closed:
            return
        log.error("stage failed", extra={"error": message, "epoch": self.place.epoch})
        self.fault = pb.Fault(kind=kind, message=message[:500], peer=peer)
        self.results.put_nowait(NotReadyError(f"this stage failed: {message}"))
        self._on_failure()

    # ---- frames

    def check(self, stream: StreamBinding) -> None:
        """Raise AccessError or ProtocolError for a data stream that is not this plan's, or another stage's."""
        if not secrets.compare_digest(stream.token, self.place.token):
            raise AccessError("the plan token is not this plan's")
        if stream.stage != self.place.stage:
            raise ProtocolError(f"stream for stage {stream.stage}, this is {self.place.stage}")

    def take(self, data: bytes) -> None:
        """Queue a frame for the engine. Raises ProtocolError when too many are, or too much."""
        frames = self._came.frames - self._begun.frames
        nbytes = self._came.nbytes - self._begun.nbytes
        if frames >= MAX_QUEUED_FRAMES or nbytes + len(data) > MAX_QUEUED_BYTES:
            raise ProtocolError(
                f"{frames} frames of {nbytes} bytes are queued already, and {len(data)} bytes come"
            )
        self._came.count(data)
        self.traffic.bytes_in += len(data)
        self.traffic.messages_in += 1
        self.thread.submit(partial(self._process, data))

    def _process(self, data: bytes) -> None:
        """On the engine thread."""
        self._begun.count(data)
        engine = self.engine
        if engine is None or self._closed:
            return
        try:
            out = self._run(engine, decode(data))
            encoded = encode(out)
        except ClusterError as error:
            self.engine = None
            self.thread.post(self._fail, pb.FAULT_KIND_PROTOCOL, str(error))
        except Exception as error:
            self._engine_failed(error)
        else:
            self.thread.post(self._pass_on, encoded, out)
            self._cache_trimmer.record_frame(out)

    def _engine_failed(self, error: Exception) -> None:
        """On the engine thread: a bug, or no memory. What the engine was at is half done."""
        log.error("engine failed", exc_info=error)
        self.engine = None
        message = f"{type(error).__name__}: {error}"
        self.thread.post(self._fail, pb.FAULT_KIND_ENGINE, message)

    def _run(self, engine: StageEngine, frame: Frame) -> Frame:
        started = time.monotonic()
        self.thread.expect(self.allowance.seconds(frame))
        out = engine.process(frame)
        self.allowance.observe(frame, time.monotonic() - started)
        return out

    def _pass_on(self, data: bytes, frame: Frame) -> None:
        if self._closed:
            return
        self.traffic.bytes_out += len(data)
        self.traffic.messages_out += 1
        self.traffic.rows += frame.rows
        self.traffic.skipped += sum(segment.cancelled for segment in frame.segments)
        if self.place.last:
            self.results.put_nowait(data)
        elif self.link is not None:
            self.link.send(data)

    # ---- signals

    def signal(self, signal: Signal) -> None:
        """Apply a rollback or a cancellation before anything that is queued."""
        match signal.body:
            case Rollback(seq_id, window, accepted_length, _):
                work = partial(self._rollback, signal.epoch, seq_id, window, accepted_length)
                self.thread.submit_urgent(work)
            case Cancel(seq_id):
                self.thread.submit_urgent(partial(self._cancel, signal.epoch, seq_id))

    def _rollback(self, epoch: int, seq_id: int, window: int, accepted_length: int) -> None:
        """On the engine thread."""
        if self.engine is not None:
            try:
                self.engine.rollback(epoch, seq_id, window, accepted_length)
            except ClusterError as error:  # a signal may be wrong; only a header may fail a plan
                log.warning("signal ignored", extra={"error": str(error)})
            except Exception as error:
                self._engine_failed(error)

    def _cancel(self, epoch: int, seq_id: int) -> None:
        """On the engine thread."""
        if self.engine is not None:
            self.engine.cancel(epoch, seq_id)


_background = BackgroundTasks()
