"""Workers of the cluster: found, described, watched, refused, lost and unloaded.

Each change becomes an event for the view. Statuses of watched workers go to `on_status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from coordinator.cluster.arithmetic_group import ArithmeticGroup
from coordinator.cluster.events import (
    Event,
    TimePassed,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerRefused,
)
from coordinator.cluster.member import Member, MemberState
from coordinator.cluster.options import ManagerOptions
from coordinator.cluster.served import ServedModel
from coordinator.cluster.view import View
from coordinator.workers.client import DESCRIBE_SECONDS, NOTICE_SHARE, WorkerClient
from coordinator.workers.connection import connect_worker
from coordinator.workers.describe import node_of
from coordinator.workers.discovery import Candidate, Discovery
from coordinator.workers.report_check import MAX_ID, MAX_NAME, report_problem, shown_name
from proto import cluster_pb2 as pb
from proto.errors import AccessError, ClusterError, DeadlineError, WorkerLostError
from proto.rpc.background_tasks import BackgroundTasks
from proto.rpc.grpc_text import printable

log = logging.getLogger(__name__)

TICK_SECONDS = 0.1
"""Seconds between two looks at the candidates and the clock."""

POLL_SECONDS = 1.0
"""Seconds before an address without a ready worker is asked again."""

PROBE_SECONDS = 1.0
"""Seconds. Deadline for a worker to answer after a plan failed for an unknown reason."""


class Membership:
    """The set of watched workers. `view` returns the coordinator's view, `apply_event` changes it.

    All methods run on the event loop's thread.
    """

    def __init__(
        self,
        model: ServedModel,
        options: ManagerOptions,
        view: Callable[[], View],
        apply_event: Callable[[Event], None],
        on_status: Callable[[str, pb.WorkerStatus], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.options = options
        self.group = ArithmeticGroup(model.exact)
        self.clients: dict[str, WorkerClient] = {}
        """Watched workers, by address."""
        self._view = view
        self._apply_event = apply_event
        self._on_status = on_status
        self._clock = clock
        self._joining: dict[str, Member] = {}
        """Watched workers that have not sent a first status yet."""
        self._described_at: dict[str, float] = {}
        """Time of the last Describe of each candidate."""
        self._last_errors: dict[str, type[ClusterError]] = {}
        """Kind of the last error of each address that did not answer as a worker."""
        self._discovery = Discovery(options.addresses, mdns=options.mdns)
        self._background = BackgroundTasks()

    # ---- life

    def start(self, time_passed: Callable[[], TimePassed] = TimePassed) -> None:
        """Begin to look for workers. `time_passed()` makes the event of each tick."""
        self._background.spawn(self._run_ticks(time_passed))

    async def close(self) -> None:
        """Unload all workers and close their clients."""
        await self._background.close()
        await asyncio.gather(
            *(self._unload_quietly(a) for a in self.clients), return_exceptions=True
        )
        await asyncio.gather(*(client.close() for client in self.clients.values()))

    async def _unload_quietly(self, address: str) -> None:
        with contextlib.suppress(ClusterError, TimeoutError):
            async with asyncio.timeout(PROBE_SECONDS):
                await self.clients[address].unload(self._view().epoch)

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

    async def _run_ticks(self, time_passed: Callable[[], TimePassed]) -> None:
        async with self._discovery as discovery:
            while True:
                for candidate in discovery.candidates():
                    self._describe_if_due(candidate)
                self._apply_event(time_passed())
                await asyncio.sleep(TICK_SECONDS)

    def _describe_if_due(self, candidate: Candidate) -> None:
        """Describe a candidate, unless it is watched or was described within POLL_SECONDS."""
        known = any(address in self.clients for address in candidate.addresses)
        asked = self._described_at.get(candidate.id, -POLL_SECONDS)
        if not known and self._clock() - asked >= POLL_SECONDS:
            # While the answer is awaited, the candidate is not due.
            self._described_at[candidate.id] = self._clock() + DESCRIBE_SECONDS
            self._background.spawn(self._describe_candidate(candidate))

    async def _describe_candidate(self, candidate: Candidate) -> None:
        """Admit the worker at the first address of `candidate` that answers with the announced worker id."""
        for address in candidate.addresses:
            try:
                client, info = await connect_worker(
                    self.options.policy, candidate, address, self.options.me, self.model.ref
                )
            except ClusterError as error:
                self._record_silence(candidate, address, error)
                continue
            self._last_errors.pop(address, None)
            await self._admit_worker(address, client, info)
            break
        self._described_at[candidate.id] = self._clock()

    def _record_silence(self, candidate: Candidate, address: str, error: ClusterError) -> None:
        """Log an address that did not answer as a worker, once per kind of error.

        A silent address is logged at debug level if mDNS announced it or if it was a worker before: mDNS records
        outlive a worker and may name addresses that only other machines reach.
        """
        member = self._view().members.get(address)
        if self._last_errors.get(address) is not type(error):
            self._last_errors[address] = type(error)
            silent = isinstance(error, WorkerLostError | DeadlineError)
            expected = silent and (candidate.announcement is not None or member is not None)
            level = logging.DEBUG if expected else logging.WARNING
            hint = ". Start mtp-worker there, or correct --worker" if silent else ""
            log.log(level, "no worker", extra={"address": address, "error": f"{error}{hint}"})
        if member is not None and member.state is MemberState.REFUSED and not member.failure_count:
            # The refused worker is gone. A worker with failures stays in the view because of its back-off.
            self._apply_event(WorkerLeft(address))

    async def _admit_worker(self, address: str, client: WorkerClient, info: pb.WorkerInfo) -> None:
        """Watch a worker that can serve this coordinator, and refuse any other."""
        known = self._view().members
        members = (self._joining.get(a) or known[a] for a in self.clients)
        if any(member.worker_id == info.worker_id for member in members):
            await client.close()  # watched at another of its addresses
            return
        name = shown_name(info, address)
        reason = report_problem(info, self.model.checkpoint.config.num_layers)
        reason = reason or self._refusal_reason(info, self.model)
        if not reason:
            member = _member(address, name, info)
            reason = self.group.refusal(name, member.arithmetic)
        if reason:
            await client.close()
            self._refuse_worker(Member(address, info.worker_id[:MAX_ID], name, 0), reason)
            return
        self.clients[address] = client
        self._joining[address] = member
        client.watch(
            self.options.failure_timeout,
            lambda worker_status: self._receive_status(address, worker_status),
            lambda error: self._record_loss(address, error),
        )

    def _refusal_reason(self, info: pb.WorkerInfo, model: ServedModel) -> str:
        """Return why a worker cannot serve this coordinator, or an empty string."""
        if info.HasField("leased_to") and info.leased_to.id != self.options.me.id:
            return f"serves coordinator {printable(info.leased_to.name, MAX_NAME)}"
        if info.model and info.fingerprint != model.ref.fingerprint:
            theirs = info.fingerprint[:12] or "none"
            return (
                f"has another checkpoint ({printable(info.model, MAX_NAME)}, fingerprint {printable(theirs, 12)}). "
                f"Start it with --model {model.ref.name}, or without --model"
            )
        if not info.fingerprint and not model.provider.can_provide:
            return "has no copy of the model. Start it with --model, or serve with --share-weights"
        if info.state == pb.WORKER_STATE_DRAINING:
            return "is leaving"
        return ""

    def _refuse_worker(self, member: Member, reason: str) -> None:
        before = self._view().members.get(member.address)
        if before is None or before.reason != reason:
            log.warning("worker refused", extra={"address": member.address, "reason": reason})
        self._apply_event(WorkerRefused(member, reason))

    # ---- another model

    async def describe_for(self, model: ServedModel) -> dict[str, Member | str]:
        """Ask every watched worker about `model`. Return a member, or the reason for a refusal, by address."""

        async def describe(address: str, client: WorkerClient) -> Member | str:
            """Describe one worker."""
            try:
                info = await client.describe(model.ref)
            except ClusterError as error:
                return str(error)
            name = shown_name(info, address)
            problem = report_problem(info, model.checkpoint.config.num_layers)
            problem = problem or self._refusal_reason(info, model)
            return f"{name} {problem}" if problem else _member(address, name, info)

        clients = dict(self.clients)
        found = await asyncio.gather(*(describe(a, c) for a, c in clients.items()))
        return dict(zip(clients, found, strict=True))

    def change_model(self, model: ServedModel, described: dict[str, Member | str]) -> None:
        """Describe workers for `model` from now on. Watched workers that refused it are released."""
        self.model = model
        for address, found in described.items():
            before = self._view().members.get(address)
            if isinstance(found, Member):
                self._apply_event(WorkerJoined(found))
            elif (client := self.clients.pop(address, None)) and before is not None:
                self._background.spawn(self._release_refused(client))
                self._refuse_worker(before, found)

    async def _release_refused(self, client: WorkerClient) -> None:
        try:
            with contextlib.suppress(ClusterError):
                await client.unload(self._view().epoch)
        finally:
            await client.close()

    # ---- watching

    def _receive_status(self, address: str, worker_status: pb.WorkerStatus) -> None:
        stall = worker_status.engine_stall_ms / 1000
        if stall > NOTICE_SHARE * self.options.failure_timeout:
            self._record_loss(address, WorkerLostError("its engine is stuck"))
            return
        if (joining := self._joining.pop(address, None)) is not None:
            log.info("worker joined", extra={"address": address, "worker": joining.name})
            self._apply_event(WorkerJoined(joining))
        if worker_status.state == pb.WORKER_STATE_DRAINING:
            self._record_draining(address)
        self._on_status(address, worker_status)

    def _record_draining(self, address: str) -> None:
        member = self._view().members.get(address)
        if member is not None and member.state is not MemberState.DRAINING:
            self._apply_event(WorkerDraining(address))
        if address not in self._view().serving:
            self._background.spawn(self._release_worker(address))

    async def _release_worker(self, address: str) -> None:
        """Unload a draining worker that no plan uses, and forget it."""
        client = self.clients.pop(address, None)
        if client is None:
            return
        try:
            with contextlib.suppress(ClusterError):
                await client.unload(self._view().epoch)
        finally:  # also if this process ends meanwhile: open heartbeats would hold the worker back
            await client.close()
        log.info("worker left", extra={"address": address})
        self._apply_event(WorkerLeft(address))

    def _record_loss(self, address: str, error: ClusterError) -> None:
        client = self.clients.pop(address, None)
        if client is None:
            return
        self._background.spawn(client.close())
        if (joining := self._joining.pop(address, None)) is not None:
            self._refuse_worker(joining, str(error))
            return
        log.warning("worker lost", extra={"address": address, "error": str(error)})
        self._apply_event(WorkerLost(address, str(error)))


def _member(address: str, name: str, info: pb.WorkerInfo) -> Member:
    node = node_of(info)
    return Member(
        address,
        info.worker_id,
        name,
        node.memory_limit,
        speed=node.speed,
        chip=printable(info.hardware.chip, MAX_NAME),
        pinned=node.pinned,
        has_files=bool(info.fingerprint),
        version=printable(info.version, MAX_NAME),
        arithmetic=printable(info.hardware.arithmetic, MAX_NAME),
    )
