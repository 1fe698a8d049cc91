"""One worker process: who holds it, which stage it is, and where its frames come from and go.

Plain asyncio, no gRPC messages but the ones it is handed: `service` turns calls into these methods. The stage itself
lives on the engine thread; here are only the facts about it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from mtp.attention import KVFormat
from proto import cluster_pb2 as pb
from proto.dataplane import StreamBinding
from proto.errors import (
    AccessError,
    BusyError,
    ClusterError,
    MemoryLimitError,
    NotReadyError,
    ProtocolError,
    StaleEpochError,
)
from proto.frame import Frame, decode, encode
from proto.signal import Cancel, Rollback, Signal
from proto.span import Span
from worker.allowance import Allowance
from worker.engine import Budget, StageEngine
from worker.link import Link
from worker.local_model import LocalModels
from worker.model.loader import DTYPES, load_stage
from worker.model.stage import Stage
from worker.model.verifier import Verifier
from worker.stage_key import StageKey
from worker.thread import EngineThread

log = logging.getLogger(__name__)

PART_SECONDS = 10.0
SLOWEST_DISK = 50e6
"""Bytes a second of a slow network disk: with PART_SECONDS for one part of a load; longer without progress is stuck."""

MAX_QUEUED_FRAMES = 256
"""More frames than this are waiting for the engine only if the sender ignores what is in flight."""


@dataclass
class Claim:
    """The coordinator this worker serves, until `expires` (monotonic seconds) unless it speaks again."""

    id: str
    name: str
    lease: float
    expires: float = 0.0
    streams: int = 0
    """Signals streams open. With the last of them the claim ends; an older one that ends late ends nothing."""

    def renew(self) -> None:
        self.expires = time.monotonic() + self.lease


@dataclass(frozen=True)
class Binding:
    """The loaded stage's place in a plan."""

    epoch: int
    stage: int
    num_stages: int
    token: bytes

    @property
    def last(self) -> bool:
        return self.stage == self.num_stages - 1


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
class Identity:
    """What the command line and the start decide."""

    name: str
    pinned: Span | None
    memory_limit: int
    models: LocalModels
    bytes_per_second: float = 0.0
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    started: float = field(default_factory=time.monotonic)


class WorkerNode:
    """Made on the event loop it runs on."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.thread = EngineThread()
        self.allowance = Allowance()
        self.state: pb.WorkerState.ValueType = pb.WORKER_STATE_IDLE
        self.claim: Claim | None = None
        self.key: StageKey | None = None
        self.stage: Stage | None = None
        self.engine: StageEngine | None = None
        self._engine_of: Binding | None = None
        """Whose frames the engine takes: the epoch does not tell one coordinator's plan from another's."""
        self.binding: Binding | None = None
        self._connecting: Binding | None = None
        self.epoch = 0
        self.limits: Budget | None = None
        self.weight_bytes = 0
        self.link: Link | None = None
        self.results: asyncio.Queue[bytes | ClusterError] = asyncio.Queue()
        self.fault: pb.Fault | None = None
        self.traffic = Traffic()
        self.draining = asyncio.Event()
        self.news = asyncio.Event()
        """Something the coordinator should hear of at once, not by the next pulse."""

    # ---- claim

    def hold(self, coordinator: pb.Coordinator, lease_ms: int = 0) -> Claim:
        """Claim this worker for a coordinator, or renew its claim.

        Raises BusyError, naming the holder, while another one's claim has not lapsed.
        """
        self.release_lapsed()
        if self.claim is None:
            self.claim = Claim(coordinator.id, coordinator.name, lease_ms / 1000 or 10.0)
        elif self.claim.id != coordinator.id:
            raise BusyError(
                f"worker {self.identity.name} serves coordinator {self.claim.name or self.claim.id}"
            )
        elif lease_ms:
            self.claim.lease = lease_ms / 1000
        self.claim.renew()
        return self.claim

    def release_lapsed(self) -> None:
        """Drop a claim that was not renewed in time, and all its sequences."""
        if self.claim is not None and time.monotonic() > self.claim.expires:
            log.warning("claim lapsed", extra={"coordinator": self.claim.name})
            self.release()

    def release(self) -> None:
        """Forget the coordinator and its sequences; weights stay for the next one."""
        self.claim = None
        self.epoch = 0  # the next coordinator counts from its own beginning
        self._unbind()

    def _unbind(self) -> None:
        self.binding = self._connecting = None
        self.thread.submit(self._drop_engine)
        if self.link is not None:
            _background(self.link.close())
            self.link = None
        self._end_results(StaleEpochError("this plan has ended"))
        if self.state in (pb.WORKER_STATE_SERVING, pb.WORKER_STATE_FAILED):
            self.state = pb.WORKER_STATE_LOADED if self.key else pb.WORKER_STATE_IDLE
        self.fault = None

    def _drop_engine(self) -> None:
        self.engine = None
        mx.clear_cache()

    def _end_results(self, error: ClusterError) -> None:
        self.results.put_nowait(error)
        self.results = asyncio.Queue()

    # ---- load and connect

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpochError(f"epoch {epoch} is over, this worker is in {self.epoch}")

    async def load(
        self, request: pb.LoadRequest, on_progress: Callable[[int, int], None]
    ) -> pb.LoadResult:
        """Become a stage. `on_progress(done, total)` is called on the event loop.

        Raises what the claim, the checkpoint, the span or the memory make impossible; an earlier stage is gone then.
        """
        self.hold(request.coordinator, request.lease_ms)
        self._check_epoch(request.epoch)
        self.epoch = request.epoch
        self._unbind()
        key = StageKey.of(request)
        self.limits = Budget(request.limits.max_sequences, request.limits.kv_tokens)
        reused = key == self.key and self.stage is not None
        if not reused:
            await self._load_weights(key, request.model, on_progress)
        if not self.draining.is_set():
            self.state = pb.WORKER_STATE_LOADED
        return self._load_result(reused)

    async def _load_weights(
        self, key: StageKey, model: pb.ModelRef, on_progress: Callable[[int, int], None]
    ) -> None:
        self.state = pb.WORKER_STATE_LOADING
        self.key = self.stage = None
        try:
            self.stage = await self.thread.call(partial(self._read_stage, key, model, on_progress))
        except BaseException:
            self.state = pb.WORKER_STATE_IDLE
            raise
        self.key = key
        log.info("stage loaded", extra={"layers": str(key.span), "bytes": self.weight_bytes})

    def _read_stage(
        self, key: StageKey, model: pb.ModelRef, on_progress: Callable[[int, int], None]
    ) -> Stage:
        """On the engine thread."""
        self.thread.expect(PART_SECONDS)
        mx.clear_cache()
        checkpoint = self.identity.models.find(model)
        sizes = checkpoint.part_bytes()
        parts = checkpoint.stage_parts(key.span, first=key.first, last=key.last, with_head=key.mtp)
        self.weight_bytes = sum(sizes[part] for part in parts)
        if self.weight_bytes > self.identity.memory_limit:
            raise MemoryLimitError(
                f"worker {self.identity.name}: layers {key.span} weigh {self.weight_bytes:,} bytes,"
                f" its memory limit is {self.identity.memory_limit:,}"
            )
        allowance = PART_SECONDS + max(sizes[part] for part in parts) / SLOWEST_DISK

        def report(done: int, total: int) -> None:
            self.thread.expect(allowance)
            self.thread.post(on_progress, done, total)

        modules = load_stage(
            checkpoint,
            key.span,
            first=key.first,
            last=key.last,
            dtype=DTYPES[key.dtype] if key.dtype else None,
            with_head=key.mtp,
            on_progress=report,
        )
        kv_format = KVFormat.of(checkpoint.config.head_dim, key.kv_bits or None)
        return Stage(modules, kv_format)

    def _load_result(self, reused: bool) -> pb.LoadResult:
        assert self.stage is not None
        return pb.LoadResult(
            reused=reused,
            weight_bytes=self.weight_bytes,
            memory_used=mx.get_active_memory(),
            has_mtp=self.stage.modules.head is not None,
        )

    async def connect(self, request: pb.ConnectRequest) -> pb.ConnectReply:
        """Bind the stage into a plan and open the hop to the next.

        Raises NotReadyError without a stage, StaleEpochError when the plan ends meanwhile, and what opening raises.
        """
        self.hold(request.coordinator)
        self._check_epoch(request.epoch)
        if self.stage is None or self.key is None:
            raise NotReadyError(f"worker {self.identity.name} has no stage loaded")
        self._unbind()
        self.epoch = request.epoch
        binding = Binding(request.epoch, request.stage, request.num_stages, request.plan_token)
        self._connecting = binding
        link_seconds = 0.0
        if request.next_address:
            link_seconds = await self._open_link(request, binding)
        await self.thread.call(partial(self._new_engine, self.stage, self.key, binding))
        if self._connecting is not binding:
            raise StaleEpochError(f"plan {binding.epoch} ended while it was being connected")
        self.binding = binding
        if not self.draining.is_set():
            self.state = pb.WORKER_STATE_SERVING
        log.info("connected", extra={"epoch": binding.epoch, "stage": binding.stage})
        return pb.ConnectReply(link_us=link_seconds * 1e6)

    async def _open_link(self, request: pb.ConnectRequest, binding: Binding) -> float:
        link = self.link = Link(
            request.next_address,
            StreamBinding(binding.epoch, binding.stage + 1, self.identity.id, binding.token),
            timeout=request.hop_timeout_ms / 1000,
            on_failure=lambda error: self._fail(
                pb.FAULT_KIND_LINK, str(error), request.next_worker_id
            ),
        )
        return await link.open()

    def _new_engine(self, stage: Stage, key: StageKey, binding: Binding) -> None:
        """On the engine thread."""
        verifier = Verifier(stage.modules, stage.kv_format) if key.last else None
        self.engine = StageEngine(
            stage, epoch=binding.epoch, first=key.first, verifier=verifier, budget=self.limits
        )
        self._engine_of = binding

    def unload(self, request: pb.UnloadRequest) -> None:
        """Forget everything. Raises BusyError for another coordinator, StaleEpochError for an older plan."""
        if self.claim is not None:
            self.hold(request.coordinator)
        self._check_epoch(request.epoch)
        self.release()
        self.key = self.stage = None
        if not self.draining.is_set():
            self.state = pb.WORKER_STATE_IDLE

    # ---- frames

    def check_stream(self, stream: StreamBinding) -> Binding:
        """Raise unless a data stream belongs to the plan in force here."""
        binding = self.binding
        if binding is None or stream.epoch != binding.epoch:
            raise StaleEpochError(f"no plan of epoch {stream.epoch} is bound here")
        if not secrets.compare_digest(stream.token, binding.token):
            raise AccessError("the plan token is not this plan's")
        if stream.stage != binding.stage:
            raise ProtocolError(f"stream for stage {stream.stage}, this is {binding.stage}")
        return binding

    def take(self, data: bytes, binding: Binding) -> None:
        """Queue a frame for the engine."""
        if self.thread.queued > MAX_QUEUED_FRAMES:
            raise ProtocolError(f"{self.thread.queued} frames are queued already")
        self.traffic.bytes_in += len(data)
        self.traffic.messages_in += 1
        self.thread.submit(partial(self._process, data, binding))

    def _process(self, data: bytes, binding: Binding) -> None:
        """On the engine thread."""
        engine = self.engine
        if engine is None or self._engine_of is not binding:
            return  # a frame of a plan that has ended
        try:
            out = self._run(engine, decode(data))
            encoded = encode(out)
        except ClusterError as error:
            self.engine = None
            self.thread.post(self._fail, pb.FAULT_KIND_PROTOCOL, str(error), "")
        except Exception as error:
            log.exception("engine failed")
            self.engine = None
            message = f"{type(error).__name__}: {error}"
            self.thread.post(self._fail, pb.FAULT_KIND_ENGINE, message, "")
        else:
            self.thread.post(self._pass_on, encoded, out, binding)

    def _run(self, engine: StageEngine, frame: Frame) -> Frame:
        started = time.monotonic()
        self.thread.expect(self.allowance.seconds(frame))
        out = engine.process(frame)
        self.allowance.observe(frame, time.monotonic() - started)
        return out

    def _pass_on(self, data: bytes, frame: Frame, binding: Binding) -> None:
        if self.binding is not binding:
            return
        self.traffic.bytes_out += len(data)
        self.traffic.messages_out += 1
        self.traffic.rows += frame.rows
        self.traffic.skipped += sum(segment.cancelled for segment in frame.segments)
        if binding.last:
            self.results.put_nowait(data)
        elif self.link is not None:
            self.link.send(data)

    def _fail(self, kind: pb.FaultKind.ValueType, message: str, peer: str) -> None:
        """The plan cannot go on here. The coordinator hears of it by pulse and by the end of the results."""
        log.error("stage failed", extra={"error": message, "epoch": self.epoch})
        self.fault = pb.Fault(kind=kind, message=message[:500], peer=peer)
        self.state = pb.WORKER_STATE_FAILED
        self.news.set()
        self._end_results(NotReadyError(f"worker {self.identity.name} failed: {message}"))

    # ---- signals

    def signal(self, signal: Signal) -> None:
        """Apply a rollback or a cancellation before anything that is queued."""
        match signal.body:
            case Rollback(seq_id, window, kept, _):
                work = partial(self._rollback, signal.epoch, seq_id, window, kept)
                self.thread.submit_urgent(work)
            case Cancel(seq_id):
                self.thread.submit_urgent(partial(self._cancel, signal.epoch, seq_id))

    def _rollback(self, epoch: int, seq_id: int, window: int, kept: int) -> None:
        if self.engine is not None:
            try:
                self.engine.rollback(epoch, seq_id, window, kept)
            except ClusterError as error:  # a signal may be wrong; only a header may fail a plan
                log.warning("signal ignored", extra={"error": str(error)})

    def _cancel(self, epoch: int, seq_id: int) -> None:
        if self.engine is not None:
            self.engine.cancel(epoch, seq_id)

    # ---- leaving

    def drain(self) -> None:
        """Ask the coordinator, by pulse, to plan without this worker."""
        self.draining.set()
        self.news.set()
        self.state = pb.WORKER_STATE_DRAINING

    async def close(self) -> None:
        self.release()
        await self.thread.close()


def _background(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine whose end nobody waits for, keeping it referenced until it is done."""
    task = asyncio.create_task(coroutine)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Task[None]] = set()
