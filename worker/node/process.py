"""The life of a worker process: listen, announce, serve, drain, end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from proto.address import join_address
from proto.announcement import Announcement
from proto.rpc.bind import bind_listener
from proto.terminal.keep_awake import keep_awake
from worker.engine.hardware import measured_bandwidth
from worker.engine.memory import set_limits
from worker.node.announce import announced
from worker.node.cluster_trust import worker_trust
from worker.node.identity import Identity
from worker.node.local_models import LocalModels
from worker.node.node import WorkerNode
from worker.node.options import WorkerOptions, remember_port, remembered_port
from worker.node.port import served

log = logging.getLogger(__name__)

DRAIN_SECONDS = 20.0
"""Seconds. Maximum wait for the coordinator to plan without this worker before the process ends."""


async def run(options: WorkerOptions) -> None:
    """Serve until SIGTERM or SIGINT, then drain and end.

    Raises UsageError for an unavailable port, a missing membership in a cluster, or an unusable --model.
    """
    models = LocalModels(options.model)
    models.check_own(options.layers)
    trust = await worker_trust(
        options.host, options.name, options.join, options.state_dir, insecure=options.insecure
    )
    identity = Identity(
        options.name, options.layers, options.memory_limit, models, wired=options.wired, trust=trust
    )
    node = WorkerNode(identity)
    await node.machinery.thread.call(partial(set_limits, options.memory_limit))
    identity.bytes_per_second = await node.machinery.thread.call(measured_bandwidth)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    async with AsyncExitStack() as stack:
        stack.enter_context(keep_awake(enabled=options.awake))
        stack.push_async_callback(node.close)
        reading = asyncio.create_task(node.sensors.refresh(), name="sensors")
        stack.callback(reading.cancel)
        listener = _bind(options)
        port = int(listener.getsockname()[1])
        await stack.enter_async_context(served(node, listener))
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
    announcement = Announcement(identity.id, identity.name, port, identity.pinned, fingerprint)
    if identity.trust is None:
        return announcement
    me = identity.trust.identity
    return replace(announcement, cluster=me.cluster, node=me.node)


def _bind(options: WorkerOptions) -> socket.socket:
    port = options.port or remembered_port(options.state_dir, options.name, options.host)
    flags = f"--listen {join_address(options.host, port)}"
    return bind_listener(flags, options.host, port)


async def _drain(node: WorkerNode) -> None:
    """Wait until the lease of this worker ends, so that no stream is interrupted."""
    if node.lease is None:
        return
    log.info("draining: waiting until the coordinator plans without this worker")
    node.drain()
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while node.lease is not None:
                await asyncio.sleep(0.05)
                node.release_lapsed()
    except TimeoutError:
        log.warning("ending before the drain completed", extra={"seconds": DRAIN_SECONDS})
