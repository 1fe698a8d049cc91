"""The workers there are: found, asked who they are, watched, refused, lost, dismissed.

What happens to them becomes events for the view; what a watched worker says of itself goes to `on_status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from coordinator.cluster.background import Background
from coordinator.cluster.events import WorkerDraining, Event, WorkerLeft, WorkerLost, WorkerRefused, WorkerJoined, TimePassed
from coordinator.cluster.member import Member, MemberState
from coordinator.cluster.options import ManagerOptions
from coordinator.cluster.served import ServedModel
from coordinator.cluster.view import View
from coordinator.planning.model_costs import REFERENCE_BANDWIDTH
from coordinator.workers.client import DESCRIBE_SECONDS, NOTICE_SHARE, WorkerClient
from coordinator.workers.discovery import Candidate, Discovery
from proto import cluster_pb2 as pb
from proto.errors import ClusterError, DeadlineError, WorkerLostError
from proto.span import Span

log = logging.getLogger(__name__)

TICK_SECONDS = 0.1
POLL_SECONDS = 1.0
"""How often an address that is not a ready worker is asked again."""

PROBE_SECONDS = 1.0
"""How long a worker may take to show that it lives, after a plan failed and nobody knows whose fault it is."""


class Membership:
    """Watches workers. `view` gives what is known, `happened` hears what is new, on the event loop."""

    def __init__(
        self,
        model: ServedModel,
        options: ManagerOptions,
        view: Callable[[], View],
        happened: Callable[[Event], None],
        on_status: Callable[[str, pb.WorkerStatus], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.options = options
        self.clients: dict[str, WorkerClient] = {}
        """Workers that are watched, by address."""
        self._view = view
        self._apply_event = happened
        self._on_status = on_status
        self._clock = clock
        self._joining: dict[str, Member] = {}
        """Workers that are watched and have not shown yet that they compute."""
        self._described_at: dict[str, float] = {}
        """When each candidate was last asked who it is."""
        self._last_errors: dict[str, type[ClusterError]] = {}
        """Why an address was no worker when it was last asked."""
        self._discovery = Discovery(options.addresses, mdns=options.mdns)
        self._background = Background()

    # ---- life

    def start(self) -> None:
        """Begin to look for workers."""
        self._background.spawn(self._ticks())

    async def close(self) -> None:
        """Let all workers go: what they hold of our requests is of no use to anyone."""
        await self._background.close()
        await asyncio.gather(*(self._unload_quietly(a) for a in self.clients), return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self.clients.values()))

    async def _unload_quietly(self, address: str) -> None:
        with contextlib.suppress(ClusterError, TimeoutError):
            async with asyncio.timeout(PROBE_SECONDS):
                await self.clients[address].unload(self._view().epoch)

    async def probe(self, address: str) -> None:
        """Ask a worker whether it lives; one that does not answer is lost."""
        try:
            if address in self.clients:
                timeout = min(PROBE_SECONDS, self.options.failure_timeout)
                await self.clients[address].describe(timeout=timeout)
        except ClusterError as error:
            self._lost(address, error)

    # ---- finding

    async def _ticks(self) -> None:
        async with self._discovery as discovery:
            while True:
                for candidate in discovery.candidates():
                    self._describe_if_due(candidate)
                self._apply_event(TimePassed())
                await asyncio.sleep(TICK_SECONDS)

    def _describe_if_due(self, candidate: Candidate) -> None:
        """Ask a candidate who it is, unless it is known or was asked just now."""
        known = any(address in self.clients for address in candidate.addresses)
        asked = self._described_at.get(candidate.id, -POLL_SECONDS)
        if not known and self._clock() - asked >= POLL_SECONDS:
            self._described_at[candidate.id] = self._clock() + DESCRIBE_SECONDS  # until it has answered
            self._background.spawn(self._describe_candidate(candidate))

    async def _describe_candidate(self, candidate: Candidate) -> None:
        """Believe the first of a candidate's addresses where the worker it names answers."""
        for address in candidate.addresses:
            client = WorkerClient(address, self.options.me)
            try:
                info = await client.describe(self.model.ref)
            except ClusterError as error:
                await client.close()
                self._record_silence(candidate, address, error)
                continue
            self._last_errors.pop(address, None)
            said = candidate.announcement
            if said is None or said.worker_id == info.worker_id:
                await self._admit_worker(address, client, info)
                break
            await client.close()
        self._described_at[candidate.id] = self._clock()

    def _record_silence(self, candidate: Candidate, address: str, error: ClusterError) -> None:
        """Nobody answers there who could serve. Said once, until the reason is another; not where that is usual: mDNS
        goes on for a while about who has left, and names addresses that only others reach."""
        member = self._view().members.get(address)
        if self._last_errors.get(address) is not type(error):
            self._last_errors[address] = type(error)
            silent = isinstance(error, WorkerLostError | DeadlineError)
            usual = silent and (candidate.announcement is not None or member is not None)
            level = logging.DEBUG if usual else logging.WARNING
            hint = "; is mtp-worker running there?" if silent else ""
            log.log(level, "no worker", extra={"address": address, "error": f"{error}{hint}"})
        if member is not None and member.state is MemberState.REFUSED and not member.failure_count:
            # It was turned away and is gone; one with losses is remembered for them.
            self._apply_event(WorkerLeft(address))

    async def _admit_worker(self, address: str, client: WorkerClient, info: pb.WorkerInfo) -> None:
        """A worker that can serve us is watched from now on."""
        known = self._view().members
        members = (self._joining.get(a) or known[a] for a in self.clients)
        if any(member.worker_id == info.worker_id for member in members):
            await client.close()  # known by another of its addresses
            return
        member = _member(address, info)
        reason = self._refusal_reason(info)
        if reason:
            await client.close()
            self._refuse_worker(member, reason)
            return
        self.clients[address] = client
        self._joining[address] = member
        client.watch(
            self.options.failure_timeout,
            lambda worker_status: self._worker_status(address, worker_status),
            lambda error: self._lost(address, error),
        )

    def _refusal_reason(self, info: pb.WorkerInfo) -> str:
        """Why a worker cannot serve us, empty when it can."""
        if info.HasField("leased_to") and info.leased_to.id != self.options.me.id:
            return f"serves coordinator {info.leased_to.name}"
        if info.model and info.fingerprint != self.model.ref.fingerprint:
            theirs = info.fingerprint[:12] or "none"
            return f"has another checkpoint ({info.model}, fingerprint {theirs})"
        if not info.fingerprint and not self.model.provider.able:
            return "has no copy of the model: give it one, or serve with --share-weights"
        if info.state == pb.WORKER_STATE_DRAINING:
            return "is leaving"
        return ""

    def _refuse_worker(self, member: Member, reason: str) -> None:
        before = self._view().members.get(member.address)
        if before is None or before.reason != reason:
            log.warning("worker refused", extra={"address": member.address, "reason": reason})
        self._apply_event(WorkerRefused(member, reason))

    # ---- watching

    def _worker_status(self, address: str, worker_status: pb.WorkerStatus) -> None:
        stall = worker_status.engine_stall_ms / 1000
        if stall > NOTICE_SHARE * self.options.failure_timeout:
            self._lost(address, WorkerLostError("its engine is stuck"))
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
        """A worker that no plan uses may leave."""
        client = self.clients.pop(address, None)
        if client is None:
            return
        try:
            with contextlib.suppress(ClusterError):
                await client.unload(self._view().epoch)
        finally:  # also where this process ends in between: nobody else would stop its heartbeats
            await client.close()
        log.info("worker left", extra={"address": address})
        self._apply_event(WorkerLeft(address))

    def _lost(self, address: str, error: ClusterError) -> None:
        client = self.clients.pop(address, None)
        if client is None:
            return
        self._background.spawn(client.close())
        if (joining := self._joining.pop(address, None)) is not None:
            self._refuse_worker(joining, str(error))
            return
        log.warning("worker lost", extra={"address": address, "error": str(error)})
        self._apply_event(WorkerLost(address, str(error)))


def _member(address: str, info: pb.WorkerInfo) -> Member:
    pinned = Span(info.pinned.start, info.pinned.end) if info.HasField("pinned") else None
    return Member(
        address,
        info.worker_id,
        info.name,
        info.hardware.memory_limit,
        speed=info.hardware.bytes_per_second / REFERENCE_BANDWIDTH or 1.0,
        chip=info.hardware.chip,
        pinned=pinned,
        whole=bool(info.fingerprint),
    )
