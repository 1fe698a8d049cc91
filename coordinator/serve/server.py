"""Composition root of `mtp-coord serve`: model, cluster, generation loop, and HTTP, which answers from the start."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from coordinator.answers.journal import Journal
from coordinator.cluster.manager import ClusterManager
from coordinator.pipeline.pipeline import PipelineSource
from coordinator.serve.app import starting_app
from coordinator.serve.certificate import TlsFiles, http_tls, renew_forever
from coordinator.serve.http_server import HostCheck, HttpServer
from coordinator.serve.model_switch import ModelSwitch
from coordinator.serve.options import ServeOptions
from coordinator.serve.own_worker import LOOPBACK, OwnWorker, with_own_worker
from coordinator.serve.served_parts import LastingParts, OpenedModel, ServedParts, make_manager, served_name
from coordinator.status.cluster_status import ClusterStatus, StatusSource
from coordinator.text.embedder import Embedder
from coordinator.trust.authority import Authority
from coordinator.trust.client_access import ClientAccess
from coordinator.trust.cluster_trust import ClusterTrust
from coordinator.trust.keys import KeyRing
from coordinator.trust.registry import Registry
from coordinator.web.context import ApiOptions
from mtp.checkpoint.hub.missing_head import fetched_if_possible, with_fetched_head
from mtp.checkpoint.hub.resolve import resolve_model
from proto import cluster_pb2 as pb
from proto.announcement import UNSPECIFIED, join_address
from proto.errors import ClusterError, MemoryLimitError, UsageError
from proto.rpc.listener import bind_listener, reachable_address
from proto.state_dir import claim
from proto.terminal.console import end_process, keep_awake
from proto.terminal.progress import OnProgress, byte_bar, format_size

log = logging.getLogger(__name__)


WAIT_REPORT_SECONDS = 5.0
"""Seconds between two lines about missing workers."""


async def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C. Afterwards everything is closed and the process ends.

    Raises UsageError if the port or the state directory is in use, and ClusterError if no first plan is possible or the
    cluster fails.
    """
    options, own = with_own_worker(options)
    host, port = options.host, options.port
    listener = bind_listener(f"--host {host} --port {port}", host, port)
    # A full collection would read every object of the imported modules and stop all streams for about 0.1 s.
    gc.freeze()
    claim(options.state)
    trust = None
    if not (options.insecure or options.single_node):
        trust = ClusterTrust.open(options.state, create=options.listen is not None)
    server = _Server(options, listener, trust, own)
    async with AsyncExitStack() as stack:
        if trust is not None:
            host, port = options.listen or (LOOPBACK, 0)
            await stack.enter_async_context(trust.listening(host, port, others=options.listen is not None))
        if own is not None:
            others = (options.required_nodes or 1) - len(options.worker)
            if options.own_worker and trust is not None and others > 0:
                _show_members(trust, others)
        if server.clients is not None:
            log.info("clients on other machines connect by the line that mtp-coord token create --client prints")
            if sys.stdout.isatty() and not server.key_ring.stored_keys():
                _show_invitation(server.clients.invite().command, "On a laptop that is a client")
        stack.enter_context(keep_awake(enabled=not options.allow_sleep))
        if server.tls is not None:
            renewal = renew_forever(options, server.tls, server.http.config)
            stack.callback(asyncio.create_task(renewal).cancel)
        await _run(server.http, server.url, listener, server.start(stack), options.model)
        if server.failure is not None:
            raise server.failure
    # In the interpreter's own cleanup gRPC was seen to hang forever.
    end_process(130 if server.http.interrupted else 0)


def _show_members(trust: ClusterTrust, others: int) -> None:
    """Show on a terminal how `others` machines take part. The line for a new one has a secret, and logs have none."""
    if not sys.stdout.isatty():
        return
    text, members = "\n", trust.registry.other_machines()
    if members:
        are = "is a member" if len(members) == 1 else "are members"
        text += f"{', '.join(members)} {are} of the cluster. Start mtp-worker there, without a token.\n"
    if (new := others - len(members)) > 0:
        text += f"On each {'new' if members else 'other'} machine, within an hour:\n\n  {trust.invite(new).command}\n\n"
    else:
        text += "For another machine: mtp-coord token create\n\n"
    sys.stdout.write(text)
    sys.stdout.flush()


def _show_invitation(command: str, place: str = "On each other machine") -> None:
    """Show `command`, which has a secret, on a terminal. Logs have no secrets."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\n{place}, within an hour:\n\n  {command}\n\n")
        sys.stdout.flush()


class ModelDownload(StatusSource):
    """The download of `model`, and the StatusSource while it runs."""

    def __init__(self, model: str, shown_name: str) -> None:
        self.stop = threading.Event()
        """Set to interrupt the download."""
        self._model = model
        self._shown_name = shown_name
        self._started = time.monotonic()
        self._detail = "opening the model"

    def run(self, on_progress: OnProgress) -> Path:
        """Return the model's directory, downloaded if needed. Blocks. Raises CheckpointError or NotReadyError."""

        def show(done: int, total: int) -> None:
            self._detail = f"downloading the model: {format_size(done)} of {format_size(total)}"
            on_progress(done, total)

        return with_fetched_head(resolve_model(self._model, show, self.stop))

    def fetch_head(self, path: Path, on_progress: OnProgress) -> Path:
        """Return the result of `fetched_if_possible`, with its progress in the status."""

        def show(done: int, total: int) -> None:
            self._detail = f"downloading the MTP head: {format_size(done)} of {format_size(total)}"
            on_progress(done, total)

        return fetched_if_possible(path, show)

    def status(self) -> ClusterStatus:
        uptime = time.monotonic() - self._started
        return ClusterStatus(False, self._shown_name, detail=self._detail, uptime_seconds=uptime)


class _Server:
    """The parts of one server, made one after another while HTTP already answers."""

    def __init__(
        self,
        options: ServeOptions,
        listener: socket.socket,
        trust: ClusterTrust | None,
        own_worker: OwnWorker | None,
    ) -> None:
        self.options = options
        self.trust = trust
        self.own_worker = own_worker
        self.embedder: Embedder | None = None
        self.tls = tls = http_tls(options)
        host, self.port = listener.getsockname()[:2]
        self.url = _url(_shown_host(host, options), self.port, tls)
        self.key_ring = key_ring = KeyRing(options.state, required=not options.is_open)
        key_ring.admit_owner(_url("127.0.0.1" if host in UNSPECIFIED else host, self.port, tls))
        self._admit_machines(Registry(options.state).removed())
        self.clients: ClientAccess | None = None
        if authority := Authority.open(options.state) if tls is not None and tls.fingerprint else None:
            self.clients = ClientAccess(options.state, authority, key_ring, self.url)
        self.download = ModelDownload(options.model, served_name(options.model))
        self.api_options = ApiOptions(
            tuple(key.strip() for key in options.api_key),
            options.allowed_origins,
            clamp_max_tokens=options.clamp_max_tokens,
            strict_names=options.strict_names,
            max_images=options.max_images,
            key_ring=key_ring,
            clients=self.clients,
        )
        file = options.state / "journal" / "answers.db"
        self.journal = Journal(file if not options.no_journal else None)
        app, hosts = starting_app(self.download, self.api_options), options.allowed_host
        self.app = HostCheck(app, socket.gethostname(), (options.host, *hosts))
        self.manager: ClusterManager | None = None
        self.parts: ServedParts | None = None
        self.failure: ClusterError | None = None  # the reason why the server ends by itself
        self._lasting: LastingParts | None = None
        self.http = HttpServer(self.app, self._end_answers, self._end_pages, self._count_answers)
        if tls is not None:
            self.http.config.ssl_certfile = tls.certificate
            self.http.config.ssl_keyfile = tls.key
            if tls.fingerprint:
                log.info("HTTP certificate", extra={"sha256": tls.fingerprint})

    def _admit_machines(self, removed: frozenset[str]) -> None:
        """Accept the key of the machines of the cluster, and a new one after a removal."""
        reachable = self.tls is not None and self.tls.fingerprint
        self.key_ring.admit_machines(self.url if reachable else "", removed)

    def _end_with(self, error: ClusterError) -> None:
        self.failure, self.http.should_exit = error, True

    async def _end_answers(self) -> None:
        if self.parts is not None:
            await self.parts.close()

    def _end_pages(self) -> None:
        feed = getattr(getattr(self.app.app, "state", None), "live_feed", None)
        if feed is not None:
            feed.close()

    def _count_answers(self) -> int:
        return 0 if self.parts is None else self.parts.count_answers()

    async def start(self, stack: AsyncExitStack) -> None:
        """Download the model if needed, make all parts, which `stack` closes, and wait for the first plan."""
        try:
            if self.options.embeddings:
                await self._start_embedder(self.options.embeddings, stack)
            if self.own_worker is not None:
                await stack.enter_async_context(self.own_worker.running())
            with byte_bar("downloading the model", log) as show:
                path = await asyncio.to_thread(self.download.run, show)
            if self.options.fetch_head:
                with byte_bar("downloading the MTP head", log) as show:
                    path = await asyncio.to_thread(self.download.fetch_head, path, show)
        finally:
            self.download.stop.set()
        stack.push_async_callback(self.journal.close)
        other_bytes = self.embedder.needed_bytes if self.embedder else 0
        model = await asyncio.to_thread(OpenedModel, self.options, path, other_bytes)
        if self.own_worker is not None:
            await self.own_worker.wait_until_it_listens()
        source = self._make_source(model, stack)
        stack.push_async_callback(self._end_answers)
        switch = ModelSwitch(self, model)
        stack.push_async_callback(switch.close)
        invite = self.trust.invite if self.trust and self.options.listen else None
        self._lasting = LastingParts(self.api_options, self.journal, self.manager, switch, invite, self.embedder)
        parts = self.make_parts(model, source)
        self.publish(parts)
        reporting = self.manager and asyncio.create_task(
            _report_wait(self.manager, self.url, open_to_others=bool(self.options.listen or self.options.insecure))
        )
        try:
            await parts.start()
            await parts.stored_answers.resume()
        finally:
            if reporting:
                reporting.cancel()

    async def _start_embedder(self, model: str, stack: AsyncExitStack) -> None:
        """Download the model of the embeddings if needed, and start its process, whose memory no worker here counts."""
        with byte_bar("downloading the embedding model", log) as show:
            path = await asyncio.to_thread(resolve_model, model, show, self.download.stop)
        self.embedder = embedder = await asyncio.to_thread(Embedder, served_name(model), path)
        stack.callback(embedder.close)
        await embedder.start()
        if self.own_worker is not None:
            self.own_worker = self.own_worker.limited_to(embedder.rest_bytes)

    def _make_source(self, model: OpenedModel, stack: AsyncExitStack) -> PipelineSource:
        """Return the source of pipelines: this process, or the manager of the workers, which is started."""
        if self.options.single_node:
            if model.why_not_alone:
                raise MemoryLimitError(model.why_not_alone)
            return model.local
        own_name = socket.gethostname().partition(".")[0]
        me = pb.Coordinator(id=secrets.token_hex(8), name=f"{own_name}:{self.port}")
        trust = self.trust
        self.manager = manager = make_manager(model, me, trust.trust if trust else None)
        model.local.reserved_bytes = manager.local_worker_bytes
        manager.count_open_requests = self._count_answers
        manager.end_process = self._end_with
        stack.push_async_callback(manager.close)
        manager.start()
        if trust is not None:

            def drop_removed(removed: frozenset[str]) -> None:
                self._admit_machines(removed)
                manager.membership.drop_removed_nodes(removed)

            watching = asyncio.create_task(trust.watch(manager.membership.clients.values, drop_removed))
            stack.callback(watching.cancel)
        return manager

    # ---- Host of the ModelSwitch

    def make_parts(self, model: OpenedModel, source: PipelineSource) -> ServedParts:
        assert self._lasting is not None
        return ServedParts(model, source, self._lasting)

    def publish(self, parts: ServedParts) -> None:
        assert self._lasting is not None
        self._end_pages()  # they reconnect to the app that serves the model
        self.parts = parts
        parts.app.state.live_feed.start()
        self.app.app = parts.app

    def pause_requests(self, reason: str) -> None:
        assert self.parts is not None
        assert self._lasting is not None
        self._end_pages()
        source = self.parts.app.state.api.status
        self.app.app = starting_app(source, self.api_options, reason, self._lasting.switch)


async def _run(
    server: HttpServer,
    url: str,
    listener: socket.socket,
    start: Coroutine[Any, Any, None],
    model: str,
) -> None:
    """Answer HTTP while `start` makes the server ready, and until the server is stopped."""
    http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    starting = asyncio.create_task(start, name="start")
    try:
        await asyncio.wait({http, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()  # raises the reason why there is no plan
            log.info("serving", extra={"url": f"{url}/v1", "model": model})
            log.info("chat with it and watch it at %s/", url)
        await http
    finally:
        starting.cancel()
        server.should_exit = True
        await asyncio.gather(http, starting, return_exceptions=True)


async def _report_wait(manager: ClusterManager, url: str, *, open_to_others: bool) -> None:
    """Log the workers that are missing for the first plan, every WAIT_REPORT_SECONDS."""
    while True:
        await asyncio.sleep(WAIT_REPORT_SECONDS)
        if waiting := manager.describe_gathering():
            hint = "" if open_to_others else ". Other machines can join only with --own-worker or --listen HOST"
            log.info("%s%s. Status: %s/status", waiting, hint, url)


def _shown_host(host: str, options: ServeOptions) -> str:
    """Return an address at which clients reach a listener on `host`."""
    if host not in UNSPECIFIED:
        return host
    with contextlib.suppress(UsageError):
        return options.listen[0] if options.listen else reachable_address()
    return "127.0.0.1"


def _url(host: str, port: int, tls: TlsFiles | None) -> str:
    return f"{'https' if tls else 'http'}://{join_address(host, port)}"
