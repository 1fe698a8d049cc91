"""The trust of a running coordinator: its certificate, joins, renewals, and the removal of nodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Protocol

from coordinator.trust.authority import CERTIFICATE_LIFE, Authority
from coordinator.trust.join_server import JoinServer
from coordinator.trust.registry import Registry
from proto import cluster_pb2 as pb
from proto.address import join_address
from proto.errors import ClusterError
from proto.trust.certificates import new_key, requested_key
from proto.trust.identity import NodeIdentity, Role, new_id
from proto.trust.join_token import new_token
from proto.trust.node_trust import NodeTrust
from proto.trust.state_dir import write_private

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Seconds between two looks at the registry: commands change it, and a removal takes effect within a second."""

REFRESH_SECONDS = 60.0
"""Seconds between two checks whether a worker's certificate needs renewal."""

LOCAL_TOKEN_SECONDS = 3600.0
LOCAL_TOKEN_USES = 100
"""Bound the token that the coordinator leaves in the state directory for workers of the same user and machine."""


class SecuredWorker(Protocol):
    """The part of a worker's client that the trust uses. `node` is empty for a worker without a certificate."""

    node: str

    async def update_trust(self, request: pb.TrustUpdate) -> pb.TrustReply:
        """Install the authorities, the removed nodes and, if given, a certificate."""


class ClusterTrust:
    """The authority, the registry and the coordinator's own credentials. `trust` is for connections to workers."""

    def __init__(self, state: Path, authority: Authority) -> None:
        self._state = state
        self.authority = authority
        self.registry = Registry(state)
        self._key = new_key()
        identity = NodeIdentity(authority.cluster, Role.COORDINATOR, new_id())
        chain = authority.issue(self._key.public_key(), identity)
        self.trust = NodeTrust(self._key, chain, authority.bundle, self.registry.removed())
        self._sent: dict[SecuredWorker, float] = {}
        """Monotonic seconds of the last update of each worker."""
        self._updates: set[asyncio.Task[None]] = set()

    @classmethod
    def open(cls, state: Path, *, create: bool) -> ClusterTrust | None:
        """Return the trust of the cluster in the state directory, or None. With `create`, make a cluster if needed."""
        authority = Authority.open(state, create=create)
        return None if authority is None else cls(state, authority)

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[None]:
        """Let machines join while the block runs. Raises UsageError if the address is not available."""
        server = JoinServer(self.authority, self.registry)
        local = self._state / "authority" / "local.token"
        async with server.listening(host, port) as bound:
            address = join_address(host, bound)
            self.registry.record_address(address)
            renewing = asyncio.create_task(self._renew_local_token(local, address))
            log.info("machines join here", extra={"address": address})
            log.info("add a machine with: mtp-coord token create")
            try:
                yield
            finally:
                renewing.cancel()
                local.unlink(missing_ok=True)

    async def _renew_local_token(self, file: Path, address: str) -> None:
        """Keep a valid token in `file`, which only this user can read."""
        while True:
            token = new_token(self.authority.cluster, self.authority.fingerprint, address)
            self.registry.add_token(token, LOCAL_TOKEN_SECONDS, LOCAL_TOKEN_USES)
            write_private(file, str(token))
            await asyncio.sleep(LOCAL_TOKEN_SECONDS / 2)

    async def watch(
        self,
        workers: Callable[[], Iterable[SecuredWorker]],
        drop_removed: Callable[[frozenset[str]], None],
    ) -> None:
        """Apply changes of the registry and the authority to this process and its workers, until cancelled.

        `workers()` returns the connected workers. `drop_removed` disconnects those that were removed.
        """
        version = (0, 0)
        while True:
            found = (self.registry.version, self.authority.version)
            if found != version:
                version = found
                self._reload()
                drop_removed(self.trust.removed)
                self._sent.clear()
            connected = [w for w in workers() if w.node and w.node not in self.trust.removed]
            self._sent = {w: at for w, at in self._sent.items() if w in connected}
            due = time.monotonic() - REFRESH_SECONDS
            for worker in connected:
                if self._sent.get(worker, -REFRESH_SECONDS) <= due:
                    self._sent[worker] = time.monotonic()
                    task = asyncio.create_task(self._update(worker))
                    self._updates.add(task)
                    task.add_done_callback(self._updates.discard)
            await asyncio.sleep(POLL_SECONDS)

    def _reload(self) -> None:
        """Read the authority and the registry again, and renew the coordinator's own certificate."""
        self.authority.reload()
        self.authority.drop_expired()
        chain = self.authority.issue(self._key.public_key(), self.trust.identity)
        self.trust.install(self.authority.bundle, self.registry.removed(), chain)

    async def _update(self, worker: SecuredWorker) -> None:
        """Give one worker the current authorities and removed nodes, and renew its certificate if it asks for it."""
        update = pb.TrustUpdate(
            authorities=self.trust.authorities, removed_nodes=sorted(self.trust.removed)
        )
        try:
            reply = await worker.update_trust(update)
            if reply.signing_request:
                key = requested_key(reply.signing_request)
                identity = NodeIdentity(self.authority.cluster, Role.WORKER, worker.node)
                update.certificate = self.authority.issue(key, identity)
                expires = time.time() + CERTIFICATE_LIFE.total_seconds()
                self.registry.record_node(worker.node, "", expires)
                await worker.update_trust(update)
                log.info("certificate renewed", extra={"node": worker.node})
        except ClusterError as error:
            log.warning("trust update failed", extra={"node": worker.node, "error": str(error)})
            self._sent.pop(worker, None)
