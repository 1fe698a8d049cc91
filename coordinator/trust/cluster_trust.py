"""The coordinator's part of the trust: updates to workers, invitations, and the server at which machines join."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from coordinator.trust.authority import AUTHORITY_LIFE, CERTIFICATE_LIFE, Authority
from coordinator.trust.client_access import INVITATION_SECONDS, Invitation
from coordinator.trust.keys import MACHINES_KEY
from coordinator.trust.registry import Registry
from proto import cluster_pb2 as pb
from proto.announcement import join_address
from proto.errors import ClusterError, ProtocolError, UsageError
from proto.rpc.listener import Acceptor, BackgroundTasks, bind_listener
from proto.state_dir import read_json, write_private
from proto.trust import joining
from proto.trust.certificates import NodeIdentity, Role, from_pem, key_to_pem, requested_key
from proto.trust.node_trust import NodeTrust

log = logging.getLogger(__name__)

REFUSED = "the coordinator refused the token: {}. Get a new one with mtp-coord token create"
"""The answer to a refused token, with the reason."""

UNWRITABLE = "the coordinator cannot write its registry. Its log has the reason. Try again later"
"""The answer while the coordinator cannot keep the machine in its state directory."""


class JoinServer:
    """The joins at one address. Errors of one connection do not reach the others."""

    def __init__(self, authority: Authority, registry: Registry) -> None:
        self._authority = authority
        self._registry = registry
        self._context, self._certificate = self._new_context()

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve joins while the block runs, and yield the port. Raises UsageError if it is not available."""
        listener = bind_listener(f"--listen {join_address(host, port)}", host, port)
        acceptor = Acceptor(listener, self._join, "joins")
        acceptor.start()
        try:
            yield listener.getsockname()[1]
        finally:
            await acceptor.close()

    def _new_context(self) -> tuple[ssl.SSLContext, x509.Certificate]:
        """Return a TLS context with a new certificate of the coordinator, and the certificate."""
        key, chain = self._authority.issue_to_coordinator()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # every join is a full handshake
        with tempfile.TemporaryDirectory() as directory:  # the library reads keys from files only
            file = Path(directory) / "join.pem"
            file.touch(0o600)
            file.write_text(key_to_pem(key) + chain)
            context.load_cert_chain(file)
        return context, from_pem(chain)[0]

    async def _join(self, connection: socket.socket) -> None:
        """Handle one connection, with the present certificate. The acceptor bounds their number."""
        peer = str(connection.getpeername()[0])
        if self._authority.must_renew(self._certificate):
            self._context, self._certificate = self._new_context()
        context = self._context
        certificate = self._certificate.public_bytes(serialization.Encoding.DER)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(joining.MAX_LINE_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            async with asyncio.timeout(joining.JOIN_SECONDS):
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol,
                    connection,
                    ssl=context,
                    ssl_handshake_timeout=joining.JOIN_SECONDS,
                )
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                try:
                    await self._answer(reader, writer, peer, certificate)
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError, ProtocolError) as error:
            log.info("join ended early", extra={"peer": peer, "error": type(error).__name__})
        finally:
            connection.close()

    async def _answer(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        certificate: bytes,
    ) -> None:
        await joining.write_message(writer, {"authorities": self._authority.chain})
        # A program that connects by mistake, such as a gRPC client, ends here. It has tried no token.
        request = await joining.read_message(reader)
        tls = writer.get_extra_info("ssl_object")
        try:
            reply = self._admit(request, joining.session_binding(tls, certificate), peer)
        except UsageError as error:  # such as a full disk
            log.error("join failed", extra={"peer": peer, "error": str(error)})
            reply = {"refused": UNWRITABLE}
        except ClusterError as error:
            log.warning("join refused", extra={"peer": peer, "reason": str(error)})
            reply = {"refused": REFUSED.format(error)}
        await joining.write_message(writer, reply)

    def _admit(self, request: dict[str, object], session: bytes, peer: str) -> dict[str, str]:
        """Return the certificate for a valid request. Raises AccessError or ProtocolError otherwise."""
        token_id, csr = joining.text_of(request, "token_id"), joining.text_of(request, "request")
        name = "".join(c for c in joining.text_of(request, "name") if c.isprintable())[:64]
        try:
            proof = bytes.fromhex(joining.text_of(request, "proof"))
        except ValueError as error:
            raise ProtocolError("the proof is malformed") from error
        key = requested_key(csr)
        is_local = self._registry.use_token(token_id, proof, session, csr)
        identity = NodeIdentity(self._authority.cluster, Role.WORKER, secrets.token_hex(8))
        chain = self._authority.issue(key, identity)
        expires = time.time() + CERTIFICATE_LIFE.total_seconds()
        self._registry.record_node(identity.node, name, expires, is_local=is_local)
        log.info("machine joined", extra={"peer": peer, "worker": name, "node": identity.node})
        return {"certificate": chain, "authorities": self._authority.bundle}


POLL_SECONDS = 0.2
"""Seconds between two looks at the registry: commands change it, and a removal takes effect within a second."""

REFRESH_SECONDS = 60.0
"""Seconds between two checks whether a worker's certificate needs renewal."""

UPDATE_RETRY_SECONDS = 5.0
"""Seconds after which an update that failed is sent again."""

LOCAL_TOKEN_SECONDS = AUTHORITY_LIFE.total_seconds()
LOCAL_TOKEN_USES = 10_000
"""Bound the token in the state directory for workers of the same user. The next start replaces it."""


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
        self._key, chain = authority.issue_to_coordinator()
        self.trust = NodeTrust(self._key, chain, authority.bundle, self.registry.removed())
        self._sent: dict[SecuredWorker, float] = {}  # monotonic seconds of the last update
        self._updates = BackgroundTasks()

    @classmethod
    def open(cls, state: Path, *, create: bool) -> ClusterTrust | None:
        """Return the trust of the cluster in the state directory, or None. With `create`, make a cluster if needed."""
        authority = Authority.open(state, create=create)
        return None if authority is None else cls(state, authority)

    def _new_token(self) -> joining.JoinToken:
        address = self.registry.address()
        return joining.new_token(self.authority.cluster, self.authority.fingerprint, address)

    def invite(self, machines: int = 1) -> Invitation:
        """Return a new invitation of `machines` machines. They join while `listening` runs."""
        token = self._new_token()
        self.registry.add_token(token, INVITATION_SECONDS, machines)
        command = f"mtp-worker --join {token}"
        return Invitation(command, round(time.time() + INVITATION_SECONDS))

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int, *, others: bool = True) -> AsyncIterator[None]:
        """Let machines join while the block runs, or without `others` only the workers of this user on this machine.

        Raises UsageError if the address is not available.
        """
        server = JoinServer(self.authority, self.registry)
        local = self._state / "authority" / "local.token"
        async with server.listening(host, port) as bound:
            address = join_address(host, bound)
            if others:
                self.registry.record_address(address)
            token = joining.new_token(self.authority.cluster, self.authority.fingerprint, address)
            self.registry.add_token(token, LOCAL_TOKEN_SECONDS, LOCAL_TOKEN_USES, is_local=True)
            write_private(local, str(token))
            if others:
                log.info("machines join here", extra={"address": address})
                log.info("add a machine by the line that mtp-coord token create prints")
            try:
                yield
            finally:
                local.unlink(missing_ok=True)

    async def watch(
        self,
        workers: Callable[[], Iterable[SecuredWorker]],
        drop_removed: Callable[[frozenset[str]], None],
    ) -> None:
        """Apply changes of registry and authority here and to `workers()`, until cancelled; disconnect removed ones."""
        version, failed_at = (0, 0), -math.inf
        while True:
            try:
                found = (self.registry.file.version, self.authority.version)
                if found != version or self.trust.due_request():
                    self._reload()
                    version = found
                    drop_removed(self.trust.removed)
                    self._sent.clear()
            except Exception as error:  # such as a full disk, or too many open files
                if (now := time.monotonic()) >= failed_at + REFRESH_SECONDS:
                    log.error("removals and renewals wait", extra={"error": str(error)})
                    failed_at = now
            connected = [w for w in workers() if w.node and w.node not in self.trust.removed]
            self._sent = {w: at for w, at in self._sent.items() if w in connected}
            due = time.monotonic() - REFRESH_SECONDS
            for worker in connected:
                if self._sent.get(worker, -REFRESH_SECONDS) <= due:
                    self._sent[worker] = time.monotonic()
                    self._updates.spawn(self._update(worker))
            await asyncio.sleep(POLL_SECONDS)

    def _reload(self) -> None:
        """Read the authority and the registry again, and renew the coordinator's own certificate."""
        self.authority.reload()
        self.authority.drop_expired()
        chain = self.authority.issue(self._key.public_key(), self.trust.identity)
        self.trust.install(self.authority.bundle, self.registry.removed(), chain)

    async def _update(self, worker: SecuredWorker) -> None:
        """Give one worker the current authorities and removed nodes, and renew its certificate if it asks for it."""
        update = pb.TrustUpdate(authorities=self.trust.authorities, removed_nodes=sorted(self.trust.removed))
        try:
            found = read_json(self._state / MACHINES_KEY)
            if found.get("url"):
                update.url, update.api_key = found["url"], found["key"]
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
            self._sent[worker] = time.monotonic() - REFRESH_SECONDS + UPDATE_RETRY_SECONDS
