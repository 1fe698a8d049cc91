"""The state of one worker process: its lease, its checkpoints, its loaded stage and its binding into a plan.

`service` turns gRPC calls into these methods. The stage itself lives on the engine thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import BUILTIN, find_model, resolve_model
from mtp.device import FrameLimits
from proto import cluster_pb2 as pb
from proto.control import Backend
from proto.errors import BusyError, CheckpointError, NotReadyError, ProtocolError, StaleEpochError, UsageError
from proto.rpc.data_connection import DataTickets, HopFigures, StreamBinding
from proto.rpc.listener import BackgroundTasks
from proto.rpc.status_codes import printable
from proto.span import Span
from proto.stage_options import MachineOptions, StageOptions
from proto.terminal.progress import OnProgress, byte_bar
from proto.trust.node_trust import NodeTrust
from worker.disk.block_index import BlockIndex
from worker.engine.group import GroupSpec
from worker.engine.hardware import release_weights
from worker.engine.host import EngineHost, LoadedStage, StageSpec
from worker.engine.stage_state import UNLIMITED, Budget
from worker.fetch.fill import SpanCopy
from worker.node.binding import Binding, Place, Traffic
from worker.node.member import END_SECONDS, SPARE_SECONDS, SPARES, MemberProcess

log = logging.getLogger(__name__)


class LocalModels:
    """The checkpoints that this worker can read, with their fingerprints while no file of them changes.

    Methods do not run on the event loop.
    """

    def __init__(self, own: Path | None) -> None:
        self.own = own
        self._known: dict[Path, tuple[Checkpoint, str]] = {}

    def find(self, wanted: pb.ModelRef) -> Checkpoint:
        """Return the first checkpoint with the fingerprint of `wanted`, or its fetched parts.

        The candidates are the worker's own --model, the path that the coordinator uses, the repo in the local cache,
        and the copy that Provide made. Raises CheckpointError that names the other checkpoints if none matches.
        """
        try:
            return self._find_whole(wanted)
        except CheckpointError:
            copy = SpanCopy.find(wanted.fingerprint)
            if copy is None:
                raise
            return copy.checkpoint()

    def _find_whole(self, wanted: pb.ModelRef) -> Checkpoint:
        others: list[str] = []
        for path in self._candidates(wanted):
            try:
                checkpoint, fingerprint = self.open(path)
            except CheckpointError as error:
                others.append(str(error))
                continue
            if fingerprint == wanted.fingerprint:
                return checkpoint
            others.append(f"{path.name} has other content (fingerprint {fingerprint[:12]})")
        found = "; ".join(others) or "it has none"
        raise CheckpointError(
            f"no checkpoint here is {wanted.name} (fingerprint {wanted.fingerprint[:12]}): {found}. "
            "Start mtp-worker with --model and the coordinator's checkpoint, or mtp-coord serve without "
            "--no-share-weights",
            public=f"a worker lacks the checkpoint {wanted.name}",
        )

    def fingerprint_of(self, wanted: pb.ModelRef) -> str:
        """Return the fingerprint of the wanted model if this machine has all of it, else an empty string."""
        try:
            self._find_whole(wanted)
        except CheckpointError:
            return ""
        return wanted.fingerprint

    def open(self, path: Path) -> tuple[Checkpoint, str]:
        """Return the checkpoint in `path` and its fingerprint, from the cache if possible."""
        known = self._known.get(path)
        if known is None or (changed := known[0].changed_file()) is not None:
            if known is not None:
                log.warning("the checkpoint has changed", extra={"file": str(changed)})
            checkpoint = Checkpoint.open(path)
            known = self._known[path] = (checkpoint, checkpoint.fingerprint())
        return known

    def _candidates(self, wanted: pb.ModelRef) -> Iterator[Path]:
        if self.own is not None:
            yield self.own
        if wanted.path and Path(wanted.path).is_dir():
            yield Path(wanted.path)
        if wanted.name == BUILTIN:
            yield resolve_model(BUILTIN)
        elif wanted.repo and (cached := find_model(wanted.repo)) is not None:
            yield cached


@dataclass
class Identity:
    """The decisions of the command line and of the start: `memory_limit` in bytes."""

    name: str
    pinned: Span | None
    memory_limit: int
    models: LocalModels
    bytes_per_second: float = 0.0
    trust: NodeTrust | None = None
    """The worker's credentials in a cluster; None for a worker whose connections are not secured."""
    machine: MachineOptions = field(default_factory=MachineOptions)
    disk: BlockIndex | None = None
    """The prefixes on disk, None without a folder."""
    direct: str = ""
    """Host of this machine at which groups exchange partial results unencrypted; empty without a direct link."""
    member_flags: tuple[str, ...] = ()
    """The flags of `mtp-worker` for a process of a group."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))


MAX_NAME = 128
"""Characters of a coordinator's id and name, which appear in logs and answers."""


@dataclass
class Lease:
    """The coordinator that this worker serves until `expires` (monotonic seconds)."""

    id: str
    name: str
    seconds: float = 10.0
    """Duration, until the coordinator sets another."""
    expires: float = 0.0
    streams: int = 0
    """Number of open Signals streams. The lease ends with the last of them."""

    def renew(self) -> None:
        """Extend the lease by its duration from now."""
        self.expires = time.monotonic() + self.seconds


def requested_stage(request: pb.LoadRequest) -> StageSpec:
    """Return the stage that a request asks for. Raises SpanError, UsageError or ProtocolError for invalid values."""
    group, asked = None, request.group
    if request.HasField("group"):
        if asked.backend not in list(Backend):
            raise ProtocolError(f"the backend {asked.backend!r:.20} is unknown")
        hosts, rdma = tuple(asked.hosts), tuple(asked.rdma)
        group = GroupSpec(asked.rank, hosts, Backend(asked.backend), rdma)
    span = Span(request.span.start, request.span.end)
    return StageSpec(span, request.first, request.last, StageOptions.from_request(request), group)


class WorkerNode:
    """The worker, made on the event loop that runs its methods."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.host = EngineHost(identity.disk, identity.machine)
        self.traffic = Traffic()
        self.tickets = DataTickets(identity.trust)
        self.state: pb.WorkerState.ValueType = pb.WORKER_STATE_IDLE
        self.lease: Lease | None = None
        self.epoch = 0
        self.loaded: LoadedStage | None = None
        self._fingerprint = ""
        """The fingerprint of the model that `loaded` belongs to."""
        self.budget = UNLIMITED
        self.binding: Binding | None = None
        """The binding that serves or is connecting."""
        self._loading: object | None = None
        """A marker of the current load. An older load that finds another marker ends."""
        self.member: MemberProcess | None = None
        """The process that holds this worker's part of a group's stage."""
        self._spares: list[MemberProcess] = []
        """The next such processes, the oldest first, while this worker is leased and was a member."""
        self._background = BackgroundTasks()
        self._ending: asyncio.Task[None] | None = None
        """The end of the process before it, whose memory the next one needs."""
        self.released = asyncio.Event()
        """Set when a lease has ended. A process for a group ends then."""
        self.state_changed = asyncio.Event()
        """Set when the coordinator must get the worker status at once."""

    # ---- lease

    def renew_lease(self, coordinator: pb.Coordinator, lease_ms: int = 0) -> Lease:
        """Lease this worker to a coordinator, or renew its lease; `lease_ms` 0 keeps the duration.

        Raises BusyError, which names the holder of another lease, and ProtocolError for an invalid id.
        """
        self.release_lapsed()
        lease = self.lease
        if lease is not None and lease.id != coordinator.id:
            holder = lease.name or lease.id
            raise BusyError(f"worker {self.identity.name} serves coordinator {holder}")
        if not 0 < len(coordinator.id) <= MAX_NAME or not coordinator.id.isprintable():
            raise ProtocolError("the coordinator's id is invalid")
        if lease is None:
            lease = self.lease = Lease(coordinator.id, printable(coordinator.name, MAX_NAME))
        if lease_ms:
            lease.seconds = lease_ms / 1000
        lease.renew()
        return lease

    def release_lapsed(self) -> None:
        """End a lease that was not renewed in time, and drop its sequences."""
        if self.lease is not None and time.monotonic() > self.lease.expires:
            log.warning("lease expired", extra={"coordinator": self.lease.name})
            self.release()

    def release(self) -> None:
        """End the lease and drop its sequences. The weights in use stay loaded for the next coordinator."""
        self.lease = None
        self.released.set()
        self.epoch = 0  # every coordinator counts its own epochs
        self._end_plan()
        while self._spares:
            self._background.spawn(self._spares.pop().stop())

    def _end_plan(self) -> None:
        self._loading = None
        if self.member is not None:
            member, self.member = self.member, None
            self._ending = asyncio.create_task(member.stop())
        if self.binding is not None:
            self.binding.close()
            self.binding = None
        if self.state != pb.WORKER_STATE_IDLE:
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

    async def _wait_for_end(self) -> None:
        """Wait for the end of an earlier group's process, or raise NotReadyError."""
        if self._ending is not None:
            _, running = await asyncio.wait({self._ending}, timeout=END_SECONDS)
            if running:
                raise NotReadyError(
                    "the process of the group before was killed and does not end. Restart this machine if it stays."
                )

    async def start_member(self, request: pb.MemberRequest) -> pb.MemberReply:
        """Start the process for a group's stage, and return where it listens. The stage of this process is dropped."""
        self.renew_lease(request.coordinator, request.lease_ms)
        if not self.identity.direct:
            raise UsageError(f"{self.identity.name} has no direct link. Restart it with --direct")
        self._enter_epoch(request.epoch)
        self.loaded = None
        self.host.thread.submit(release_weights)
        self._become(pb.WORKER_STATE_IDLE)
        loading = self._loading = object()
        await self._wait_for_end()
        self._spares = [spare for spare in self._spares if spare.running]
        member = self._spares.pop(0) if self._spares else await MemberProcess.spawn(self.identity.member_flags)
        ready = await member.serve()
        if self._loading is not loading:
            await member.stop()
            raise StaleEpochError(f"plan {request.epoch} ended while its processes were starting")
        self.member = member
        self._background.spawn(self._prepare_spares())
        log.info("process for a group started", extra={"port": ready.port})
        return ready

    async def _prepare_spares(self) -> None:
        """Start the processes that replace the present one, unless they are there or the group has ended."""
        for _ in range(SPARES):
            await asyncio.sleep(SPARE_SECONDS)
            if self.member is None or len(self._spares) >= SPARES:
                return
            spare = await MemberProcess.spawn(self.identity.member_flags)
            if self.lease is None or len(self._spares) >= SPARES:
                await spare.stop()
                return
            self._spares.append(spare)

    async def load(self, request: pb.LoadRequest, on_progress: OnProgress) -> pb.LoadResult:
        """Load a stage, unless it is in memory, and return what was loaded. Ends the plan of the worker before.

        `on_progress` is called on the event loop. After an error the earlier stage may be unloaded.
        """
        self.renew_lease(request.coordinator, request.lease_ms)
        spec = requested_stage(request)
        self._enter_epoch(request.epoch)
        limits = request.limits
        self.budget = Budget(limits.max_sequences, limits.kv_tokens, limits.prefix_bytes)
        wanted = spec, request.model.fingerprint
        if self.loaded is not None and wanted == (self.loaded.spec, self._fingerprint):
            loaded = self.loaded
        else:  # without a reference to the former stage, whose memory the new one needs
            loaded = await self._load_weights(spec, request.model, on_progress)
        self._become(pb.WORKER_STATE_LOADED)
        frames = FrameLimits.here(sparse=loaded.stage.modules.config.num_experts > 0)
        return pb.LoadResult(
            layers=loaded.stage.variants.summary,
            longest_chunk=frames.longest,
            shortest_chunk=frames.shortest,
            collective_us=1e6 * loaded.collective,
        )

    def _become(self, state: pb.WorkerState.ValueType) -> None:
        """Set the state, unless the worker drains."""
        if self.state != pb.WORKER_STATE_DRAINING:
            self.state = state

    async def _load_weights(self, spec: StageSpec, model: pb.ModelRef, on_progress: OnProgress) -> LoadedStage:
        self.loaded = None  # frees its memory for the new stage
        loading = self._loading = object()
        await self._wait_for_end()
        self._become(pb.WORKER_STATE_LOADING)
        thread = self.host.thread

        def check() -> None:
            if self._loading is not loading:
                raise StaleEpochError("the plan ended while its stage was loading")

        identity = self.identity
        with byte_bar(f"loading layers {spec.span}", log) as show:

            def report(done: int, total: int) -> None:
                check()  # a newer load or plan waits for the thread
                show(done, total)
                thread.post(on_progress, done, total)

            read = partial(
                self.host.load,
                partial(identity.models.find, model),
                spec,
                report,
                memory_limit=identity.memory_limit,
                fingerprint=model.fingerprint,
            )
            try:
                loaded = await thread.call(read)
                check()
            except BaseException:
                if self._loading is loading:
                    self._end_plan()
                raise
        self.loaded, self._fingerprint = loaded, model.fingerprint
        log.info("stage loaded", extra={"layers": str(spec.span), "bytes": loaded.weight_bytes})
        return loaded

    async def connect(self, request: pb.ConnectRequest) -> pb.ConnectReply:
        """Bind the stage into a plan and open its links. Raises their errors, NotReadyError and StaleEpochError."""
        self.renew_lease(request.coordinator)
        self._check_epoch(request.epoch)
        if self.loaded is None:
            raise NotReadyError(f"worker {self.identity.name} has no stage loaded")
        self._enter_epoch(request.epoch)
        stage, stages, rank = request.stage, request.num_stages, request.rank
        token, sender = request.plan_token, request.previous_node
        place = Place(request.epoch, stage, stages, token, sender, rank)
        binding = Binding(place, self.host, self.traffic, self._failed, self.identity.trust)
        self.binding = binding
        make_engine = partial(self.host.make_engine, self.loaded, place.epoch, self.budget)
        try:
            hop = await binding.open(make_engine, request)
        except BaseException:
            if self.binding is binding:
                self._end_plan()
            raise
        self._become(pb.WORKER_STATE_SERVING)
        log.info("connected", extra={"epoch": place.epoch, "stage": place.stage})
        return _connect_reply(hop, has_disk=self.loaded.prefixes is not None)

    async def connect_ring(self, request: pb.RingRequest) -> pb.ConnectReply:
        """Open the link from this stage, the last one, to the first stage. Raises its errors and StaleEpochError."""
        self.renew_lease(request.coordinator)
        return _connect_reply(await self._bound_in(request.epoch).open_ring(request))

    def _bound_in(self, epoch: int) -> Binding:
        if self.binding is None or not self.binding.bound or epoch != self.binding.place.epoch:
            raise StaleEpochError(f"no plan of epoch {epoch} is bound here")
        return self.binding

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
        self.host.thread.submit(release_weights)
        self._become(pb.WORKER_STATE_IDLE)

    # ---- frames and signals of the current plan

    def binding_of(self, stream: StreamBinding) -> Binding:
        """Return the binding of a data stream. Raises StaleEpochError, AccessError or ProtocolError for another one."""
        binding = self._bound_in(stream.epoch)
        binding.check_stream(stream)
        return binding

    def apply_signal(self, signal: pb.Signal) -> None:
        """Apply a rollback or a cancellation to its plan. A signal of another plan is ignored."""
        if self.binding is not None and signal.epoch == self.binding.place.epoch:
            self.binding.apply_signal(signal)

    # ---- end

    def drain(self) -> None:
        """Ask the coordinator, by the worker status, to plan without this worker."""
        self.state = pb.WORKER_STATE_DRAINING
        self.state_changed.set()

    async def close(self) -> None:
        """End the plan, the process of a group and the engine thread."""
        self.release()
        with contextlib.suppress(NotReadyError):
            await self._wait_for_end()
        await self.host.close()


def _connect_reply(hop: HopFigures | None, *, has_disk: bool = False) -> pb.ConnectReply:
    reply = pb.ConnectReply(has_disk=has_disk)
    if hop is not None:
        reply.link_us, reply.link_bytes_per_second = hop.seconds * 1e6, hop.bytes_per_second
    return reply
