"""The state of one worker process: its lease, its loaded stage and its binding into a plan.

`service` turns gRPC calls into these methods. The stage itself lives on the engine thread.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from proto import cluster_pb2 as pb
from proto.control import Signal
from proto.errors import NotReadyError, StaleEpochError
from proto.progress import OnProgress
from proto.rpc.data_plane import StreamBinding
from proto.rpc.data_socket import DataTickets
from proto.rpc.hop_probe import HopFigures
from proto.terminal.progress_bar import byte_bar
from worker.engine.cpu_compiler import compiled_functions
from worker.engine.memory import release_weights
from worker.engine.sensors import Sensors
from worker.engine.stage_engine import Budget, StageEngine
from worker.model.verifier import Verifier
from worker.node.binding import Binding, Machinery, Place
from worker.node.identity import Identity
from worker.node.lease import Lease, renewed_lease
from worker.node.loading import LoadedStage, adopt_stage, read_stage
from worker.node.stage_ahead import StageAhead
from worker.node.stage_key import StageKey

log = logging.getLogger(__name__)


class WorkerNode:
    """The worker, made on the event loop that runs its methods."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.machinery = Machinery()
        self.sensors = Sensors()
        self.tickets = DataTickets(identity.trust)
        self.state: pb.WorkerState.ValueType = pb.WORKER_STATE_IDLE
        self.lease: Lease | None = None
        self.epoch = 0
        self.loaded: LoadedStage | None = None
        self.ahead = StageAhead(identity, self.machinery.thread)
        self.budget: Budget | None = None
        self.binding: Binding | None = None
        """The binding that serves or is connecting."""
        self._loading: object | None = None
        """A marker of the current load. An older load that finds another marker ends."""
        self.draining = asyncio.Event()
        self.state_changed = asyncio.Event()
        """Set when the coordinator must get the worker status at once."""

    # ---- lease

    def renew_lease(self, coordinator: pb.Coordinator, lease_ms: int = 0) -> Lease:
        """Lease this worker to a coordinator, or renew its lease.

        Raises BusyError, which names the holder, while another coordinator has the lease.
        """
        self.release_lapsed()
        self.lease = renewed_lease(self.lease, self.identity.name, coordinator, lease_ms)
        return self.lease

    def release_lapsed(self) -> None:
        """End a lease that was not renewed in time, and drop its sequences."""
        if self.lease is not None and self.lease.lapsed:
            log.warning("lease expired", extra={"coordinator": self.lease.name})
            self.release()

    def release(self) -> None:
        """End the lease and drop its sequences. The weights in use stay loaded for the next coordinator."""
        self.lease = None
        self.ahead.drop()
        self.epoch = 0  # every coordinator counts its own epochs
        self._end_plan()

    def _end_plan(self) -> None:
        """End the current load or binding."""
        self._loading = None
        if self.binding is not None:
            self.binding.close()
            self.binding = None
        if self.state not in (pb.WORKER_STATE_IDLE, pb.WORKER_STATE_DRAINING):
            self._become(pb.WORKER_STATE_LOADED if self.loaded else pb.WORKER_STATE_IDLE)

    # ---- load and connect

    def _enter_epoch(self, epoch: int) -> None:
        """End the current plan and start epoch `epoch`. Raises StaleEpochError for an older epoch."""
        self._check_epoch(epoch)
        self.epoch = epoch
        self._end_plan()

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpochError(f"epoch {epoch} has ended. This worker is in epoch {self.epoch}")

    async def load(self, request: pb.LoadRequest, on_progress: OnProgress) -> pb.LoadResult:
        """Load a stage and return what was loaded. `on_progress` is called on the event loop.

        Raises BusyError, StaleEpochError, CheckpointError, SpanError or MemoryLimitError. The earlier stage may then
        be unloaded. A request that loads `ahead` unloads only a stage that the plan in force does not use.
        """
        self.renew_lease(request.coordinator, request.lease_ms)
        key = StageKey.of(request)
        if request.ahead:
            self._check_epoch(request.epoch)
            if request.epoch > self.epoch:
                self._leave_plan(request.epoch, key)
            loaded = self.loaded
            if loaded is None or loaded.key != key:
                loaded = await self.ahead.load(request.model, key, on_progress)
        else:
            loaded = await self._load_next(key, request, on_progress)
        return pb.LoadResult(
            weight_bytes=loaded.weight_bytes, has_mtp=loaded.stage.modules.head is not None
        )

    def _leave_plan(self, epoch: int, key: StageKey) -> None:
        """End the plan of an older epoch than that of the plan in force, and free its stage unless it is `key`."""
        self._enter_epoch(epoch)
        if self.loaded is not None and self.loaded.key != key:
            self.loaded = None
            self.machinery.thread.submit(release_weights)
            self._become(pb.WORKER_STATE_IDLE)

    async def _load_next(
        self, key: StageKey, request: pb.LoadRequest, on_progress: OnProgress
    ) -> LoadedStage:
        """End the plan and return the stage of the next one, which is read unless it is in memory."""
        self._enter_epoch(request.epoch)
        limits = request.limits
        self.budget = Budget(limits.max_sequences, limits.kv_tokens, limits.prefix_bytes)
        loaded = self.loaded
        if loaded is None or loaded.key != key:
            loaded = await self._load_weights(key, request.model, on_progress)
        else:
            self.ahead.drop()
        self._become(pb.WORKER_STATE_LOADED)
        return loaded

    def _become(self, state: pb.WorkerState.ValueType) -> None:
        """Set the state, unless the worker drains: then the state stays DRAINING."""
        if not self.draining.is_set():
            self.state = state

    async def _load_weights(
        self, key: StageKey, model: pb.ModelRef, on_progress: OnProgress
    ) -> LoadedStage:
        self._become(pb.WORKER_STATE_LOADING)
        self.loaded = None  # frees its memory for the new stage
        loading = self._loading = object()
        thread = self.machinery.thread
        ahead = self.ahead.take(key)

        def check() -> None:
            """Raise StaleEpochError if a newer load or plan has begun."""
            if self._loading is not loading:
                raise StaleEpochError("the plan ended while its stage was loading")

        with byte_bar(f"loading layers {key.span}", log) as show:

            def report(done: int, total: int) -> None:
                """Report the progress unless this load has become stale."""
                check()  # ends this load when a newer one waits for the thread
                show(done, total)
                thread.post(on_progress, done, total)

            read = partial(
                read_stage, self.identity, model, key, expect=thread.expect, on_progress=report
            )
            if ahead is not None:
                read = partial(adopt_stage, ahead, wired=self.identity.wired)
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
        """Bind the stage into a plan and open the link to the next stage.

        Raises NotReadyError without a loaded stage, StaleEpochError when the plan ends during the call, and the
        errors of opening the link.
        """
        self.renew_lease(request.coordinator)
        self._check_epoch(request.epoch)
        if self.loaded is None:
            raise NotReadyError(f"worker {self.identity.name} has no stage loaded")
        self._enter_epoch(request.epoch)
        place = Place(
            request.epoch,
            request.stage,
            request.num_stages,
            request.plan_token,
            request.previous_node,
        )
        binding = self.binding = Binding(place, self.machinery, self._failed)
        make_engine = partial(_new_engine, self.loaded, place, self.budget)
        try:
            hop = await binding.open(make_engine, request, self.identity.id, self.identity.trust)
        except BaseException:
            if self.binding is binding:
                self._end_plan()
            raise
        self._become(pb.WORKER_STATE_SERVING)
        log.info("connected", extra={"epoch": place.epoch, "stage": place.stage})
        return _connect_reply(hop)

    async def connect_ring(self, request: pb.RingRequest) -> pb.ConnectReply:
        """Open the link from this stage, the last one, to the first stage of its plan.

        Raises StaleEpochError for another plan, ProtocolError on another stage, and the errors of opening the link.
        """
        self.renew_lease(request.coordinator)
        binding = self.binding
        if binding is None or not binding.bound or request.epoch != binding.place.epoch:
            raise StaleEpochError(f"no plan of epoch {request.epoch} is bound here")
        return _connect_reply(
            await binding.open_ring(request, self.identity.id, self.identity.trust)
        )

    def _failed(self) -> None:
        self._become(pb.WORKER_STATE_FAILED)
        self.state_changed.set()

    def unload(self, request: pb.UnloadRequest) -> None:
        """Drop the stage and the lease. Raises BusyError for another coordinator, StaleEpochError for an older plan."""
        if self.lease is not None:
            self.renew_lease(request.coordinator)
        self._check_epoch(request.epoch)
        self.release()
        self.loaded = None
        self.machinery.thread.submit(release_weights)
        self._become(pb.WORKER_STATE_IDLE)

    # ---- frames and signals of the current plan

    def binding_of(self, stream: StreamBinding) -> Binding:
        """Return the binding that a data stream belongs to.

        Raises StaleEpochError for a stream of another plan, AccessError for a wrong token, and ProtocolError for
        another stage.
        """
        binding = self.binding
        if binding is None or not binding.bound or stream.epoch != binding.place.epoch:
            raise StaleEpochError(f"no plan of epoch {stream.epoch} is bound here")
        binding.check_stream(stream)
        return binding

    def apply_signal(self, signal: Signal) -> None:
        """Apply a rollback or a cancellation to its plan. A signal of another plan is ignored."""
        if self.binding is not None and signal.epoch == self.binding.place.epoch:
            self.binding.apply_signal(signal)

    # ---- end

    def drain(self) -> None:
        """Ask the coordinator, by the worker status, to plan without this worker."""
        self.draining.set()
        self.state_changed.set()
        self.state = pb.WORKER_STATE_DRAINING

    async def close(self) -> None:
        """End the plan and the engine thread."""
        self.release()
        await self.machinery.thread.close()


def _new_engine(loaded: LoadedStage, place: Place, budget: Budget | None) -> StageEngine:
    """Return the engine of a plan. Runs on the engine thread."""
    compiled_functions.adjust()
    stage, key = loaded.stage, loaded.key
    verifier = Verifier(stage.modules, stage.kv_format, stage.draft_vocab) if key.last else None
    return StageEngine(stage, epoch=place.epoch, first=key.first, verifier=verifier, budget=budget)


def _connect_reply(hop: HopFigures | None) -> pb.ConnectReply:
    if hop is None:
        return pb.ConnectReply()
    return pb.ConnectReply(
        link_us=hop.seconds * 1e6,
        link_bytes_per_second=hop.bytes_per_second,
        link_kind=hop.kind,
    )
