"""Composition root of `mtp-coord serve`: model, cluster, generation loop and HTTP API.

HTTP answers from the start. While the model is downloaded, `/status` shows the progress.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from coordinator.api.app import create_app
from coordinator.api.http_server import HttpServer
from coordinator.api.request.context import ApiOptions
from coordinator.api.request.host_check import HostCheck
from coordinator.api.starting_app import SwitchedApp, starting_app
from coordinator.api.stored.stored_answers import StoredAnswers
from coordinator.cluster.manager import ClusterManager
from coordinator.cluster.view import Phase
from coordinator.generation.limits import Limits
from coordinator.generation.loop import GenerationLoop
from coordinator.generation.scheduler import Scheduler
from coordinator.journal.journal import Journal
from coordinator.local_engine.generator import effective_mtp_mode
from coordinator.pipeline.local import LocalPipelines, LocalSource
from coordinator.server.download import ModelDownload
from coordinator.server.http_tls import TlsFiles, http_tls
from coordinator.server.live_status import LiveStatus
from coordinator.server.model_admin import model_admin
from coordinator.server.model_parts import local_model, make_manager, served_name, why_not_alone
from coordinator.server.model_status import model_status
from coordinator.server.options import ServeOptions
from coordinator.server.trace_report import trace_report
from coordinator.text.model_info import ModelInfo, generation_defaults
from coordinator.text.output_format import GrammarCompiler
from coordinator.text.tokenizer import Tokenizer
from coordinator.trust.cluster_trust import ClusterTrust
from coordinator.trust.invitation import make_invitation
from coordinator.trust.key_ring import KeyRing
from coordinator.web.live_trace import LiveTrace
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.depth.controller import Controller
from proto import cluster_pb2 as pb
from proto.address import join_address
from proto.errors import MemoryLimitError
from proto.rpc.bind import bind_listener
from proto.terminal.keep_awake import keep_awake
from proto.terminal.progress_bar import byte_bar

log = logging.getLogger(__name__)

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in proto/terminal/console.py."""

FIRST_WAIT_REPORT = 1.0
"""Seconds before the first line about missing workers. Workers that are up join faster."""

WAIT_REPORT_SECONDS = 10.0
"""Seconds between two lines about missing workers."""


async def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C. Afterwards everything is closed and the process ends.

    Raises UsageError if the port is not available, and ClusterError if no first plan is possible.
    """
    listener = bind_listener(
        f"--host {options.host} --port {options.port}", options.host, options.port
    )
    trust = open_trust(options)
    server = _Server(options, listener, trust)
    async with AsyncExitStack() as stack:
        if trust is not None and options.join_address is not None:
            await stack.enter_async_context(trust.listening(*options.join_address))
        stack.enter_context(keep_awake(enabled=options.awake))
        await _run(server.http, server.url, listener, server.start(stack), options.model)
    _leave(INTERRUPTED if server.http.interrupted else 0)


class _Server:
    """The parts of one server, made one after another while HTTP already answers."""

    def __init__(
        self, options: ServeOptions, listener: socket.socket, trust: ClusterTrust | None
    ) -> None:
        self.options = options
        self.trust = trust
        tls = http_tls(options)
        self.port: int = listener.getsockname()[1]
        self.url = _url(listener, tls)
        self.download = ModelDownload(options.model, served_name(options.model))
        self.api_options = ApiOptions(
            options.api_keys,
            options.allowed_origins,
            clamp_max_tokens=options.clamp_max_tokens,
            key_ring=KeyRing(options.state),
        )
        self.journal = Journal(
            options.state / "journal" / "answers.db" if options.journal else None, options.retention
        )
        self.stored_answers: StoredAnswers | None = None
        self.app = SwitchedApp(starting_app(self.download, self.api_options))
        self.loop: GenerationLoop | None = None
        self.http = HttpServer(
            HostCheck(self.app, socket.gethostname(), (options.host, *options.allowed_hosts)),
            self._end_answers,
            self._end_pages,
            self._count_answers,
        )
        if tls is not None:
            self.http.config.ssl_certfile = tls.certificate
            self.http.config.ssl_keyfile = tls.key
            if tls.fingerprint:
                log.info("HTTP certificate", extra={"sha256": tls.fingerprint})

    async def _end_answers(self) -> None:
        if self.stored_answers is not None:
            await self.stored_answers.suspend()
        if self.loop is not None:
            await self.loop.close()

    def _end_pages(self) -> None:
        feed = getattr(getattr(self.app.app, "state", None), "live_feed", None)
        if feed is not None:
            feed.close()

    def _count_answers(self) -> int:
        if self.loop is None:
            return 0
        snapshot = self.loop.snapshot()
        return len(snapshot.requests) + snapshot.waiting

    async def start(self, stack: AsyncExitStack) -> None:
        """Download the model if needed, make all parts, and wait for the first plan.

        Parts to be closed go to `stack`.
        """
        try:
            with byte_bar("downloading the model", log) as show:
                path = await asyncio.to_thread(self.download.run, show)
        finally:
            self.download.stop.set()
        stack.push_async_callback(self.journal.close)
        self.loop, manager = self._make_parts(path, stack)
        reporting = manager and asyncio.create_task(_report_wait(manager, self.url))
        try:
            await self.loop.start()
            assert self.stored_answers is not None
            await self.stored_answers.resume()
        finally:
            if reporting:
                reporting.cancel()

    def _make_parts(
        self, path: Path, stack: AsyncExitStack
    ) -> tuple[GenerationLoop, ClusterManager | None]:
        options = self.options
        checkpoint = Checkpoint.open(path)
        mode = effective_mtp_mode(checkpoint, options.mtp)
        tokenizer = Tokenizer.load(checkpoint.path, checkpoint.config.eos_token_ids)
        tokenizer.limit_tokens(checkpoint.config.max_positions)
        limits = Limits(
            checkpoint.config.max_positions,
            checkpoint.config.vocab_size,
            prefill_chunk=options.prefill_chunk or LocalPipelines.default_prefill_chunk(),
            step_tokens=options.step_tokens,
        )
        local = LocalPipelines(local_model(checkpoint, options, mode))
        reading = asyncio.create_task(local.sensors.refresh(), name="sensors")
        stack.callback(reading.cancel)
        manager = None
        if options.single_node:
            if problem := why_not_alone(local.model):
                raise MemoryLimitError(problem)
            source: ClusterManager | LocalSource = LocalSource(local.make)
        else:
            me = pb.Coordinator(id=secrets.token_hex(8), name=f"{options.name}:{self.port}")
            source = manager = make_manager(
                checkpoint, options, mode, me, local, self.trust.trust if self.trust else None
            )
            local.reserved_bytes = manager.local_worker_bytes
            manager.count_open_requests = self._count_answers
            stack.push_async_callback(manager.close)
            manager.start()
            if self.trust is not None:
                watching = asyncio.create_task(
                    self.trust.watch(manager.clients.values, manager.drop_removed_nodes)
                )
                stack.callback(watching.cancel)
        vocabulary = GrammarCompiler(tokenizer).vocabulary
        loop = GenerationLoop(source, Scheduler(limits, Controller(mode), vocabulary))
        stack.push_async_callback(loop.close)
        model = ModelInfo(
            served_name(options.model),
            checkpoint.config.max_positions,
            replace(generation_defaults(checkpoint.path), acceptance=options.acceptance),
            options.served_names,
            fingerprint=checkpoint.fingerprint(),
        )
        admin = model_admin(options, model.id, manager, local)
        stack.push_async_callback(admin.jobs.close)
        trust = self.trust
        app = create_app(
            loop,
            tokenizer,
            model,
            LiveStatus(
                loop,
                manager,
                model.id,
                local.status,
                model_status(checkpoint),
                lambda: local.sensors.latest,
                lambda: tuple(admin.jobs.jobs),
            ),
            self.api_options,
            replan=manager.replan if manager else None,
            frames=loop.frames,
            collect_trace=partial(trace_report, loop),
            journal=self.journal,
            model_admin=admin,
            invite=partial(make_invitation, trust) if trust and options.join_address else None,
        )
        self.stored_answers = app.state.stored_answers
        stack.push_async_callback(app.state.stored_answers.suspend)
        self._end_pages()  # they reconnect to the app that serves the model
        app.state.live_feed.trace = LiveTrace(loop.frames, loop.collect_trace)
        app.state.live_feed.start()
        self.app.app = app
        return loop, manager


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
            log.info("ask it with: mtp-coord generate --url %s --prompt 'Hello'", url)
            log.info("watch it with: mtp-coord status --url %s", url)
        await http
    finally:
        starting.cancel()
        server.should_exit = True
        await asyncio.gather(http, starting, return_exceptions=True)


async def _report_wait(manager: ClusterManager, url: str) -> None:
    """Log the workers that are missing for the first plan, every WAIT_REPORT_SECONDS."""
    await asyncio.sleep(FIRST_WAIT_REPORT)
    while True:
        if manager.view.phase is Phase.GATHERING:
            log.info("waiting for workers: %s; status: %s/status", manager.describe_wait(), url)
        await asyncio.sleep(WAIT_REPORT_SECONDS)


def open_trust(options: ServeOptions) -> ClusterTrust | None:
    """Return the trust of this cluster. A server with --listen makes one if there is none."""
    if options.insecure or options.single_node:
        return None
    return ClusterTrust.open(options.state, create=options.join_address is not None)


def _url(listener: socket.socket, tls: TlsFiles | None) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{join_address(host, port)}"


def _leave(status: int) -> NoReturn:
    """End the process without the interpreter's own cleanup, in which gRPC was seen to hang forever."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
