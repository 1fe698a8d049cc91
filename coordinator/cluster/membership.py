"""The members of a cluster: which workers are watched, and the arithmetic they must share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from coordinator.cluster import events
from coordinator.cluster.discovery import Discovery, on_this_machine
from coordinator.cluster.served_model import ServedModel
from coordinator.cluster.view import Member, MemberState, Settings, View
from coordinator.pipeline.worker_client import DESCRIBE_SECONDS, MAX_SPEED, NOTICE_SHARE, WorkerClient
from coordinator.pipeline.worker_connection import Candidate, ConnectionPolicy, connect_worker
from coordinator.planning.capacity import REFERENCE_BANDWIDTH
from proto import cluster_pb2 as pb
from proto.announcement import JOIN_FLAG, host_of, is_loopback, join_address, parse_address
from proto.errors import AccessError, ClusterError, DeadlineError, UsageError, WorkerLostError
from proto.rpc.listener import BackgroundTasks, reachable_address
from proto.rpc.status_codes import NO_MEMBERS, printable
from proto.span import Span

log = logging.getLogger(__name__)

LEAVING = "is leaving"
"""Why a worker that drains is not used."""

MAX_MEMORY = 2**50
"""Bytes. One pebibyte: far above any machine, and small enough for sums."""

MAX_NAME = 64
"""Characters of a name in logs and status."""

MAX_ARITHMETIC = 160
"""Characters of an arithmetic. A cut name would hide the version at its end."""

MAX_ID = 128
"""Characters of a worker id. Our workers send 16."""


@dataclass(frozen=True)
class ManagerOptions:
    """Options of one ClusterManager.

    `addresses` are always tried as workers; `mdns` looks for more. A worker is lost after `failure_timeout` seconds of
    silence, of a hop that takes no frame, or of an engine that makes no progress. `policy` decides which workers the
    coordinator connects to.
    """

    me: pb.Coordinator
    settings: Settings
    addresses: tuple[str, ...] = ()
    mdns: bool = False
    failure_timeout: float = 3.0
    policy: ConnectionPolicy = field(default_factory=ConnectionPolicy)


@dataclass
class ArithmeticGroup:
    """The arithmetic of an `--exact` cluster. The first plan fixes it, because an answer may outlive a plan."""

    exact: bool
    nodes: int = 1
    """Machines that the first plan needs."""
    _name: str = ""
    _arithmetic: str = ""

    def choose(self, members: Collection[Member]) -> None:
        """Take the arithmetic of enough `members` for a plan, or else of those with the most memory together."""
        kinds: dict[str, list[Member]] = {}
        for member in members:
            kinds.setdefault(member.arithmetic, []).append(member)

        def merit(kind: str) -> tuple[bool, int, bool]:
            memory = sum(member.memory_limit for member in kinds[kind])
            return len(kinds[kind]) >= self.nodes, memory, kind == self._arithmetic

        if kinds and (best := max(kinds, key=merit)) != self._arithmetic:
            self._name, self._arithmetic = kinds[best][0].name, best

    def refusal(self, name: str, arithmetic: str) -> str:
        """Return why the machine `name` cannot take part, or an empty string. Without a choice it makes the choice."""
        if not self.exact:
            return ""
        if not self._arithmetic:
            self._name, self._arithmetic = name, arithmetic
        if arithmetic == self._arithmetic:
            return ""
        other, advice = rounding_difference(arithmetic, self._arithmetic)
        return (
            f"has {other} than {self._name}: {arithmetic or 'unknown'}, and not {self._arithmetic}. They round "
            f"differently, and --exact needs equal machines. {advice}, or serve without --exact"
        )


def rounding_difference(arithmetic: str, other: str) -> tuple[str, str]:
    """Return for people the first difference of two names of an arithmetic, and what removes it."""
    (machine, _, _), (others, _, _) = arithmetic.partition(", mlx "), other.partition(", mlx ")
    if arithmetic and machine == others:
        return "another version of mlx", "Install the same version on both"
    backend = machine.split(" ")[0] != others.split(" ")[0]
    return "another backend" if backend else "another chip", "Name only equal ones with --worker"


def unlike_machines(machines: Iterable[tuple[str, str]]) -> str:
    """Return for people which of `machines`, pairs of name and arithmetic, round differently; empty if none do."""
    kinds: dict[str, list[str]] = {}
    for name, arithmetic in machines:
        kinds.setdefault(arithmetic, []).append(name)
    if len(kinds) < 2:
        return ""
    named = [f"{', '.join(names)} ({kind or 'unknown'})" for kind, names in kinds.items()]
    return f"answers may differ in rounding between {' and '.join(named)}"


TICK_SECONDS = 0.1
"""Seconds between two looks at the candidates and the clock."""

POLL_SECONDS = 1.0
"""Seconds before an address without a ready worker is asked again."""

JOIN_SECONDS = 2.0
"""Seconds after the start in which a worker of this machine may still join the cluster, so it is not used without."""

PROBE_SECONDS = 1.0
"""Seconds. Deadline for a worker to answer after a plan failed for an unknown reason."""

Descriptions = dict[WorkerClient, Member | str]
"""The member that each watched worker is, or the reason for its refusal."""


@dataclass(eq=False)
class Membership:
    """The set of watched workers. `view` returns the coordinator's view, `apply_event` changes it."""

    model: ServedModel
    options: ManagerOptions
    view: Callable[[], View]
    apply_event: Callable[[events.Event], None]
    on_status: Callable[[str, pb.WorkerStatus], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.group = ArithmeticGroup(self.model.options.exact, self.options.settings.nodes or 1)
        self.clients: dict[str, WorkerClient] = {}
        """Watched workers, by address."""
        self._started = self.clock()
        self._joining: dict[str, Member] = {}  # watched, without a first status yet
        self._described_at: dict[str, float] = {}  # time of each candidate's last Describe
        self._last_errors: dict[str, type[ClusterError]] = {}
        """Kind of the last logged error of each address that did not answer as a worker."""
        self._discovery = Discovery(self.options.addresses, mdns=self.options.mdns)
        self._background = BackgroundTasks()

    # ---- life

    def start(self, time_passed: Callable[[], events.TimePassed] = events.TimePassed) -> None:
        """Begin to look for workers. `time_passed()` makes the event of each tick."""
        self._background.spawn(self._run_ticks(time_passed))

    async def close(self) -> None:
        """Unload all workers and close their clients."""
        await self._background.close()
        await asyncio.gather(*map(self._release, self.clients.values()), return_exceptions=True)

    async def _release(self, client: WorkerClient) -> None:
        """Unload a worker and close its client, also if the worker does not answer in time."""
        try:
            with contextlib.suppress(ClusterError, TimeoutError):
                async with asyncio.timeout(PROBE_SECONDS):
                    request = pb.UnloadRequest(coordinator=client.me, epoch=self.view().epoch)
                    await client.call(client.stub.Unload, request)
        finally:  # also if this process ends meanwhile: open heartbeats would hold the worker back
            await client.close()

    async def probe(self, address: str) -> None:
        """Ask a worker to describe itself. A worker that does not answer is recorded as lost."""
        try:
            if address in self.clients:
                timeout = min(PROBE_SECONDS, self.options.failure_timeout)
                await self.clients[address].describe(timeout=timeout)
        except ClusterError as error:
            self._record_loss(address, error)

    def drop_removed_nodes(self, removed: frozenset[str]) -> None:
        """Record every watched worker whose node id is in `removed` as lost."""
        for address, client in tuple(self.clients.items()):
            if client.node in removed:
                self._record_loss(address, AccessError("was removed from the cluster"))

    # ---- finding

    async def _run_ticks(self, time_passed: Callable[[], events.TimePassed]) -> None:
        async with self._discovery as discovery:
            while True:
                try:
                    self._ask_candidates(discovery.candidates())
                    self.apply_event(time_passed())
                except Exception:  # a bug here: later ticks may succeed
                    log.exception("looking for workers failed")
                    await asyncio.sleep(POLL_SECONDS)
                await asyncio.sleep(TICK_SECONDS)

    def _ask_candidates(self, candidates: Sequence[Candidate]) -> None:
        """Begin to describe the candidates that are due, and forget those that are gone."""
        self._described_at = {c.id: self._described_at.get(c.id, -POLL_SECONDS) for c in candidates}
        addresses = {address for candidate in candidates for address in candidate.addresses}
        self._last_errors = {a: kind for a, kind in self._last_errors.items() if a in addresses}
        for candidate in candidates:
            known = any(address in self.clients for address in candidate.addresses)
            if not known and self.clock() - self._described_at[candidate.id] >= POLL_SECONDS:
                # While the answer is awaited, the candidate is not due.
                self._described_at[candidate.id] = self.clock() + DESCRIBE_SECONDS
                self._background.spawn(self._describe_candidate(candidate))

    async def _describe_candidate(self, candidate: Candidate) -> None:
        """Admit the worker at the first address of `candidate` that answers with the announced worker id."""
        model = self.model
        for address in candidate.addresses:
            try:
                known = self.view().members.get(address)
                refusal = known.reason if known and known.state is MemberState.REFUSED else ""
                client, info = await connect_worker(
                    self.options.policy, candidate, address, self.options.me, model.ref, refusal=refusal
                )
            except ClusterError as error:
                self._record_silence(candidate, address, error)
                continue
            self._last_errors.pop(address, None)
            if model is self.model:
                await self._admit_worker(address, client, info)
            else:  # the answer is about the earlier model, so the worker is asked again
                await client.close()
            break
        self._described_at[candidate.id] = self.clock()

    def _record_silence(self, candidate: Candidate, address: str, error: ClusterError) -> None:
        """Log an address that did not answer as a worker, once for each kind of error.

        A peer that does not prove to be a member is shown as refused. A silent address is logged at debug level if mDNS
        announced it or if it was a worker before: mDNS records outlive a worker and may name addresses that only other
        machines reach.
        """
        member = self.view().members.get(address)
        # Workers that announce another cluster are none of this one's concern.
        named = isinstance(error, AccessError) and candidate.announcement is None
        refused = named or any(text in str(error) for text in NO_MEMBERS)
        known = member and member.state is MemberState.REFUSED and not member.failure_count
        if self._last_errors.get(address) is not type(error):
            self._last_errors[address] = type(error)
            silent = isinstance(error, WorkerLostError | DeadlineError) and not refused
            expected = silent and (candidate.announcement is not None or member is not None)
            level = logging.DEBUG if expected else logging.WARNING
            hint = ". Start mtp-worker there, or correct --worker" if silent else ""
            log.log(level, "no worker", extra={"address": address, "error": f"{error}{hint}"})
        if refused and (member is None or member.reason != str(error)):
            stranger = member or Member(address, "", printable(candidate.name, MAX_NAME), 0)
            self.apply_event(events.WorkerRefused(stranger, str(error)))
        elif known and not refused:
            # The refused worker is gone. A worker with failures stays in the view because of its back-off.
            self.apply_event(events.WorkerLeft(address))

    async def _admit_worker(self, address: str, client: WorkerClient, info: pb.WorkerInfo) -> None:
        """Watch a worker that can serve this coordinator, and refuse any other."""
        known = self.view().members
        members = (self._joining.get(a) or known[a] for a in self.clients)
        if any(member.worker_id == info.worker_id for member in members):
            await client.close()  # watched at another of its addresses
            return
        name = shown_name(info, address)
        reason = self._refusal_reason(info, self.model)
        reason = reason or self._mixing_reason(client) or self._loopback_reason(address)
        member = Member(address, info.worker_id[:MAX_ID], name, 0) if reason else member_of(address, info)
        if reason := reason or self._rounding_reason(member):
            await client.close()
            self._refuse_worker(member, reason)
            return
        self.clients[address] = client
        self._joining[address] = member
        on_status = partial(self._receive_status, address)
        client.watch(self.options.failure_timeout, on_status, partial(self._record_loss, address))

    def _refusal_reason(self, info: pb.WorkerInfo, model: ServedModel) -> str:
        """Return why a worker cannot serve this coordinator, or an empty string."""
        if problem := report_problem(info, model.checkpoint.config.num_layers):
            return problem
        if info.HasField("leased_to") and info.leased_to.id != self.options.me.id:
            return f"serves coordinator {printable(info.leased_to.name, MAX_NAME)}"
        if info.model and info.fingerprint != model.ref.fingerprint:
            theirs = info.fingerprint[:12] or "none"
            return (
                f"has another checkpoint ({printable(info.model, MAX_NAME)}, fingerprint {printable(theirs, 12)}). "
                f"Start it with --model {model.ref.name}, or without --model"
            )
        if not info.fingerprint and model.provider.problem:
            return model.provider.problem
        if info.state == pb.WORKER_STATE_DRAINING:
            return LEAVING
        return ""

    def _mixing_reason(self, client: WorkerClient) -> str:
        """Return why a worker cannot share a plan with the watched ones: all belong to the cluster, or none does."""
        open_one = client.trust is None
        secured = self.options.policy.trust is not None
        if open_one and secured and self.clock() < self._started + JOIN_SECONDS:
            return "has not joined the cluster yet"
        if open_one and secured:
            return f"has not joined the cluster. Restart it with {JOIN_FLAG}"
        others = sorted(a for a, c in self.clients.items() if (c.trust is None) != open_one)
        if not others:
            return ""
        if open_one:
            return f"has not joined the cluster. Restart it with {JOIN_FLAG}"
        return f"cannot work with {others[0]}, which has not joined the cluster. Restart that one with {JOIN_FLAG}"

    def _loopback_reason(self, address: str) -> str:
        """Return why a worker on loopback and one of another machine cannot share a plan, or an empty string."""
        on_loopback = is_loopback(host_of(address))
        for known in sorted(self.clients):
            if on_loopback != is_loopback(host_of(known)) and not on_this_machine(known if on_loopback else address):
                hidden, other = (address, known) if on_loopback else (known, address)
                with contextlib.suppress(UsageError):  # no address, so the workers are not reachable either
                    _, port = parse_address("--worker", hidden)
                    better = join_address(reachable_address(), port)
                    stop = "Restart it" if on_loopback else f"Restart the worker at {hidden}"
                    return f"cannot work with {known}: {other} cannot reach {hidden}. {stop} with --listen {better}"
        return ""

    def _rounding_reason(self, member: Member) -> str:
        """Return why `--exact` leaves `member` out. Until the first plan, a worker that joins may change the choice."""
        if self.group.exact and not self.view().epoch:
            known = {**self.view().members, **self._joining, member.address: member}
            self.group.choose([one for one in known.values() if one.arithmetic and not one.is_lost])
            for address in tuple(self.clients):
                if reason := self.group.refusal(known[address].name, known[address].arithmetic):
                    self._background.spawn(self._release(self.clients.pop(address)))
                    self._joining.pop(address, None)
                    self._refuse_worker(known[address], reason)
        return self.group.refusal(member.name, member.arithmetic)

    def _refuse_worker(self, member: Member, reason: str) -> None:
        before = self.view().members.get(member.address)
        if before is None or before.reason != reason:
            level = logging.INFO if reason == LEAVING else logging.WARNING
            log.log(level, "worker refused", extra={"address": member.address, "reason": reason})
        self.apply_event(events.WorkerRefused(member, reason))

    # ---- another model

    async def describe_for(self, model: ServedModel) -> Descriptions:
        """Ask every watched worker about `model`, also those that are admitted meanwhile."""

        async def describe(address: str, client: WorkerClient) -> None:
            try:
                info = await client.describe(model.ref)
            except ClusterError as error:
                described[client] = str(error)
            else:
                problem, name = self._refusal_reason(info, model), shown_name(info, address)
                described[client] = f"{name} {problem}" if problem else member_of(address, info)

        described: Descriptions = {}
        while new := [(a, c) for a, c in self.clients.items() if c not in described]:
            await asyncio.gather(*(describe(a, c) for a, c in new))
        return described

    def change_model(self, model: ServedModel, described: Descriptions) -> None:
        """Describe workers for `model` from now on, and release those that refused it. Call it after `describe_for`."""
        self.model = model
        for address, client in tuple(self.clients.items()):
            found, joining = described[client], self._joining.pop(address, None)
            if isinstance(found, str):
                del self.clients[address]
                self._background.spawn(self._release(client))
                self._refuse_worker(joining or self.view().members[address], found)
            elif joining is None:
                self.apply_event(events.WorkerJoined(found))
            else:
                self._joining[address] = found

    # ---- watching

    def _receive_status(self, address: str, worker_status: pb.WorkerStatus) -> None:
        stall = worker_status.engine_stall_ms / 1000
        if stall > NOTICE_SHARE * self.options.failure_timeout:
            self._record_loss(address, WorkerLostError("its engine is stuck"))
            return
        if (joining := self._joining.pop(address, None)) is not None:
            log.info("worker joined", extra={"address": address, "worker": joining.name})
            self.apply_event(events.WorkerJoined(joining))
        if worker_status.state == pb.WORKER_STATE_DRAINING:
            self._record_draining(address)
        self.on_status(address, worker_status)

    def _record_draining(self, address: str) -> None:
        member = self.view().members.get(address)
        if member is not None and member.state is not MemberState.DRAINING:
            self.apply_event(events.WorkerDraining(address))
        if address not in self.view().serving:
            self._background.spawn(self._release_worker(address))

    async def _release_worker(self, address: str) -> None:
        """Unload a draining worker that no plan uses, and forget it."""
        client = self.clients.pop(address, None)
        if client is not None:
            await self._release(client)
            log.info("worker left", extra={"address": address})
            self.apply_event(events.WorkerLeft(address))

    def _record_loss(self, address: str, error: ClusterError) -> None:
        client = self.clients.pop(address, None)
        if client is None:
            return
        self._background.spawn(client.close())
        if (joining := self._joining.pop(address, None)) is not None:
            self._refuse_worker(joining, str(error))
            return
        log.warning("worker lost", extra={"address": address, "error": str(error)})
        self.apply_event(events.WorkerLost(address, str(error)))


def shown_name(info: pb.WorkerInfo, address: str) -> str:
    """Return the worker's name without control characters, cut to MAX_NAME characters, or its address."""
    return printable(info.name, MAX_NAME) or address


def report_problem(info: pb.WorkerInfo, num_layers: int) -> str:
    """Return what is wrong with a report for a model of `num_layers` layers, or an empty string."""
    hardware = info.hardware
    if not info.worker_id or len(info.worker_id) > MAX_ID or not info.worker_id.isprintable():
        return "reports an invalid worker id"
    if not 0 <= hardware.bytes_per_second <= MAX_SPEED:  # not for NaN either
        return f"reports an invalid speed of {hardware.bytes_per_second:g} bytes/s"
    if not 0 < hardware.memory_limit <= MAX_MEMORY:
        return f"reports an invalid memory limit of {hardware.memory_limit} bytes"
    if info.HasField("pinned"):
        start, end = info.pinned.start, info.pinned.end
        if start >= end:
            return f"pins the layers {start} to {end}, which are none"
        if end > num_layers:
            return (
                f"is pinned to layers {start}-{end - 1}, and the model has {num_layers} (0-{num_layers - 1}). "
                "Restart it with other --layers"
            )
    return ""


def member_of(address: str, info: pb.WorkerInfo) -> Member:
    """Return a described worker as a member. A worker that has not measured its speed has the speed 1."""
    return Member(
        address,
        info.worker_id,
        shown_name(info, address),
        info.hardware.memory_limit,
        speed=info.hardware.bytes_per_second / REFERENCE_BANDWIDTH or 1.0,
        chip=printable(info.hardware.chip, MAX_NAME),
        pinned=Span(info.pinned.start, info.pinned.end) if info.HasField("pinned") else None,
        has_files=bool(info.fingerprint),
        version=printable(info.version, MAX_NAME),
        arithmetic=_arithmetic_of(info),
        direct=printable(info.direct, MAX_NAME),
        blocks=tuple((one.layers.start, one.layers.end, one.bytes) for one in info.blocks),
    )


def _arithmetic_of(info: pb.WorkerInfo) -> str:
    return printable(info.hardware.arithmetic, MAX_ARITHMETIC)
