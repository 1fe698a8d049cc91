"""One worker process: who holds it, which stage it has loaded, which plan that is bound into.

Plain asyncio, no gRPC messages but the ones it is handed: `service` turns calls into these methods. The stage itself
lives on the engine thread; here are only the facts about it.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import mlx.core as mx

from proto import cluster_pb2 as pb
from proto.control import Signal
from proto.errors import NotReadyError, StaleEpochError
from proto.progress import OnProgress
from proto.rpc.data_plane import StreamBinding
from proto.terminal.progress_bar import byte_bar
from worker.engine.memory import release_weights
from worker.engine.stage_engine import Budget, StageEngine
from worker.model.verifier import Verifier
from worker.node.binding import Binding, Machinery, Place
from worker.node.identity import Identity
from worker.node.lease import Lease, renewed_lease
from worker.node.loading import LoadedStage, read_stage
from worker.node.stage_key import StageKey

log = logging.getLogger(__name__)


class WorkerNode:
    """Made on the event loop it runs on."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.machinery = Machinery()
        self.state: pb.WorkerState.ValueType = pb.WORKER_STATE_IDLE
        self.lease: Lease | None = None
        self.epoch = 0
        self.loaded: LoadedStage | None = None
        self.budget: Budget | None = None
        self.binding: Binding | None = None
        """In force, or being connected."""
        self._loading: object | None = None
        """Stands for the load under way; any other is wanted no more."""
        self.draining = asyncio.Event()
        self.news = asyncio.Event()
        """Something the coordinator should hear of at once, not by the next pulse."""

    # ---- claim

    def hold(self, coordinator: pb.Coordinator, lease_ms: int = 0) -> Lease:
        """Claim this worker for a coordinator, or renew its claim.

        Raises BusyError, naming the holder, while another one's claim has not lapsed.
        """
        self.release_lapsed()
        self.lease = renewed_lease(self.lease, self.identity.name, coordinator, lease_ms)
        return self.lease

    def release_lapsed(self) -> None:
        """Drop a claim that was not renewed in time, and all its sequences."""
        if self.lease is not None and self.lease.lapsed:
            log.warning("claim lapsed", extra={"coordinator": self.lease.name})
            self.release()

    def release(self) -> None:
        """Forget the coordinator and its sequences; weights stay for the next one."""
        self.lease = None
        self.epoch = 0  # the next coordinator counts from its own beginning
        self._end_plan()

    def _end_plan(self) -> None:
        """What is here of a plan: its load, or its binding."""
        self._loading = None
        if self.binding is not None:
            self.binding.close()
            self.binding = None
        if self.state not in (pb.WORKER_STATE_IDLE, pb.WORKER_STATE_DRAINING):
            self._become(pb.WORKER_STATE_LOADED if self.loaded else pb.WORKER_STATE_IDLE)

    # ---- load and connect

    def _enter_epoch(self, epoch: int) -> None:
        """Whatever plan there was has ended. Raises StaleEpochError for an epoch that has."""
        self._check_epoch(epoch)
        self.epoch = epoch
        self._end_plan()

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpochError(f"epoch {epoch} is over, this worker is in {self.epoch}")

    async def load(self, request: pb.LoadRequest, on_progress: OnProgress) -> pb.LoadResult:
        """Become a stage. `on_progress(done, total)` is called on the event loop.

        Raises what the claim, the checkpoint, the span or the memory make impossible; an earlier stage is gone then.
        """
        self.hold(request.coordinator, request.lease_ms)
        self._enter_epoch(request.epoch)
        key = StageKey.of(request)
        limits = request.limits
        self.budget = Budget(limits.max_sequences, limits.kv_tokens, limits.prefix_bytes)
        loaded = self.loaded
        reused = loaded is not None and loaded.key == key
        if loaded is None or not reused:
            loaded = await self._load_weights(key, request.model, on_progress)
        self._become(pb.WORKER_STATE_LOADED)
        return pb.LoadResult(
            reused=reused,
            weight_bytes=loaded.weight_bytes,
            memory_used=mx.get_active_memory(),
            has_mtp=loaded.stage.modules.head is not None,
        )

    def _become(self, state: pb.WorkerState.ValueType) -> None:
        """A worker that drains says so whatever it still does."""
        if not self.draining.is_set():
            self.state = state

    async def _load_weights(
        self, key: StageKey, model: pb.ModelRef, on_progress: OnProgress
    ) -> LoadedStage:
        self._become(pb.WORKER_STATE_LOADING)
        self.loaded = None  # its memory is needed for the other
        loading = self._loading = object()
        thread = self.machinery.thread

        def check() -> None:
            if self._loading is not loading:
                raise StaleEpochError("the plan ended while its stage was being loaded")

        with byte_bar(f"loading layers {key.span}", log) as show:

            def report(done: int, total: int) -> None:
                check()  # the next load waits for the thread, and its coordinator for a sign of it
                show(done, total)
                thread.post(on_progress, done, total)

            read = partial(
                read_stage, self.identity, model, key, expect=thread.expect, on_progress=report
            )
            try:
                loaded = await thread.call(read)
                check()
            except BaseException:
                if self._loading is loading:
                    self._end_plan()
                raise
        self.loaded = loaded
        log.info("stage loaded", extra={"layers": str(key.span), "bytes": loaded.weight_bytes})
        return loaded

    async def connect(self, request: pb.ConnectRequest) -> pb.ConnectReply:
        """Bind the stage into a plan and open the hop to the next.

        Raises NotReadyError without a stage, StaleEpochError when the plan ends meanwhile, and what opening raises.
        """
        self.hold(request.coordinator)
        self._check_epoch(request.epoch)
        if self.loaded is None:
            raise NotReadyError(f"worker {self.identity.name} has no stage loaded")
        self._enter_epoch(request.epoch)
        place = Place(request.epoch, request.stage, request.num_stages, request.plan_token)
        binding = self.binding = Binding(place, self.machinery, self._failed)
        make_engine = partial(_new_engine, self.loaded, place, self.budget)
        try:
            link_seconds = await binding.open(make_engine, request, self.identity.id)
        except BaseException:
            if self.binding is binding:
                self._end_plan()
            raise
        self._become(pb.WORKER_STATE_SERVING)
        log.info("connected", extra={"epoch": place.epoch, "stage": place.stage})
        return pb.ConnectReply(link_us=link_seconds * 1e6)

    def _failed(self) -> None:
        self._become(pb.WORKER_STATE_FAILED)
        self.news.set()

    def unload(self, request: pb.UnloadRequest) -> None:
        """Forget everything. Raises BusyError for another coordinator, StaleEpochError for an older plan."""
        if self.lease is not None:
            self.hold(request.coordinator)
        self._check_epoch(request.epoch)
        self.release()
        self.loaded = None
        self.machinery.thread.submit(release_weights)
        self._become(pb.WORKER_STATE_IDLE)

    # ---- what comes for the plan in force

    def binding_of(self, stream: StreamBinding) -> Binding:
        """Where a data stream's frames go. Raises StaleEpochError unless it belongs to the plan in force here, and
        AccessError or ProtocolError for one that claims so wrongly."""
        binding = self.binding
        if binding is None or not binding.bound or stream.epoch != binding.place.epoch:
            raise StaleEpochError(f"no plan of epoch {stream.epoch} is bound here")
        binding.check(stream)
        return binding

    def signal(self, signal: Signal) -> None:
        """Hand a rollback or a cancellation to the plan it is about; one that has ended needs none."""
        if self.binding is not None and signal.epoch == self.binding.place.epoch:
            self.binding.signal(signal)

    # ---- leaving

    def drain(self) -> None:
        """Ask the coordinator, by pulse, to plan without this worker."""
        self.draining.set()
        self.news.set()
        self.state = pb.WORKER_STATE_DRAINING

    async def close(self) -> None:
        self.release()
        await self.machinery.thread.close()


def _new_engine(loaded: LoadedStage, place: Place, budget: Budget | None) -> StageEngine:
    """On the engine thread."""
    stage, key = loaded.stage, loaded.key
    verifier = Verifier(stage.modules, stage.kv_format) if key.last else None
    return StageEngine(stage, epoch=place.epoch, first=key.first, verifier=verifier, budget=budget)
