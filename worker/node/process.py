"""A worker process from start to end: listen, announce, serve, drain, leave."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from functools import partial

import grpc.aio

from proto.announcement import Announcement
from proto.errors import UsageError
from proto.terminal.keep_awake import keep_awake
from worker.engine.hardware import measured_bandwidth
from worker.engine.memory import set_limits
from worker.node.announce import announced
from worker.node.identity import Identity
from worker.node.local_models import LocalModels
from worker.node.node import WorkerNode
from worker.node.options import WorkerOptions, remember_port, remembered_port
from worker.node.service import STOP_SECONDS, make_server

log = logging.getLogger(__name__)

DRAIN_SECONDS = 20.0
"""Longest wait for the coordinator to plan without this worker; then it leaves all the same."""


async def run(options: WorkerOptions) -> None:
    """Serve until SIGTERM or SIGINT, then hand over and leave.

    Raises UsageError when the port cannot be had, or the worker's own model not be served.
    """
    models = LocalModels(options.model)
    models.check_own(options.layers)
    identity = Identity(
        options.name, options.layers, options.memory_limit, models, wired=options.wired
    )
    node = WorkerNode(identity)
    await node.machinery.thread.call(partial(set_limits, options.memory_limit))
    identity.bytes_per_second = await node.machinery.thread.call(measured_bandwidth)
    server = make_server(node)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    async with AsyncExitStack() as stack:
        stack.enter_context(keep_awake(enabled=options.awake))
        stack.push_async_callback(node.close)
        port = _bind(server, options)
        await server.start()
        stack.push_async_callback(server.stop, STOP_SECONDS)
        remember_port(options.state_dir, options.name, port)
        if options.mdns:
            await stack.enter_async_context(announced(_announcement(identity, port), options.host))
        log.info(
            "worker ready",
            extra={
                "worker": options.name,
                "address": f"{options.host}:{port}",
                "layers": str(options.layers or "any"),
            },
        )
        await stopping.wait()
        await _drain(node)


def _announcement(identity: Identity, port: int) -> Announcement:
    own = identity.models.own
    fingerprint = identity.models.open(own)[1] if own else ""
    return Announcement(identity.id, identity.name, port, identity.pinned, fingerprint)


def _bind(server: grpc.aio.Server, options: WorkerOptions) -> int:
    port = options.port or remembered_port(options.state_dir, options.name, options.host)
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        return server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise UsageError(
            f"--listen {host}:{port}: the address cannot be had; is another worker running there? "
            "Use --listen with another port, or port 0 for any"
        ) from error


async def _drain(node: WorkerNode) -> None:
    """Wait until no coordinator holds this worker, so that no stream is cut."""
    if node.lease is None:
        return
    log.info("draining: waiting for the coordinator to plan without this worker")
    node.drain()
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while node.lease is not None:
                await asyncio.sleep(0.05)
                node.release_lapsed()
    except TimeoutError:
        log.warning("leaving undrained", extra={"seconds": DRAIN_SECONDS})
