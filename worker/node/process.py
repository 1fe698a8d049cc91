"""The life of a worker process: credentials, listen, announce, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from mtp.checkpoint.hub.resolve import find_model
from proto.announcement import JOIN_FLAG, UNSPECIFIED, Announcement, host_of, is_loopback, join_address, parse_address
from proto.errors import AccessError, ClusterError, DeadlineError, UsageError, WorkerLostError
from proto.rpc.channels import add_port
from proto.rpc.data_connection import DataPort
from proto.rpc.listener import bind_listener, own_addresses
from proto.stage_options import MachineOptions
from proto.state_dir import COORDINATOR, claim_memory, read_text, state_dir, write_private
from proto.terminal.console import keep_awake
from proto.trust.joining import JoinToken, join
from proto.trust.node_trust import NodeTrust
from worker.engine.hardware import checked_memory_limit, measured_bandwidth, set_limits
from worker.engine.prefix_disk import open_index
from worker.node.advice import Advisor
from worker.node.announce import announced
from worker.node.member import group_address, report_ready, when_stdin_ends
from worker.node.node import Identity, LocalModels, WorkerNode
from worker.node.options import EVERYWHERE, LOOPBACK, WorkerOptions
from worker.node.service import STOP_SECONDS, make_server

log = logging.getLogger(__name__)

LOCAL_TOKEN = Path("authority", "local.token")
"""The file in the state directory where a coordinator on this machine keeps a token for its user's workers."""

CREDENTIALS = "worker"
"""The folder of the worker's credentials in the state directory."""

LAST_LISTEN = Path(CREDENTIALS, "listen")
"""The file in the state directory with the address at which the worker listened when it joined."""


async def worker_trust(
    host: str, name: str, token: str | None, given: Path | None, *, insecure: bool
) -> NodeTrust | None:
    """Return the credentials of a worker that listens on `host`, or None for a listener without TLS.

    That is one with `insecure`, or one on loopback while no coordinator of this user has a cluster. `token` is the
    value of --join, `given` that of --state-dir. Raises UsageError, and the errors of a join.
    """
    if token and insecure:
        raise UsageError("--join secures the connections of this worker. Use it without --insecure")
    if insecure and not is_loopback(host):
        log.warning("insecure: any machine that reaches this worker can use it and read its data")
    state = state_dir(given)
    directory = state / CREDENTIALS
    local = read_text(state / LOCAL_TOKEN)
    if insecure or (is_loopback(host) and not token and not local):
        return None
    if token:
        return await _join_or_stay(token, name, directory)
    problem: UsageError | None = None
    try:
        trust = NodeTrust.load(directory)
    except UsageError as error:
        trust, problem = None, error
    if trust is None and local:
        try:
            return await _join(local, name, directory)
        except ClusterError as error:
            if not is_loopback(host):
                raise
            log.warning("not joined, so without TLS on loopback", extra={"error": str(error)})
            return None
    if trust is None:
        raise problem or UsageError(
            f"--listen {host} is open to the network, and this machine has joined no cluster. Start mtp-coord serve "
            f"first, if it runs on this machine. Else use {JOIN_FLAG} there, or --insecure"
        )
    me = trust.identity
    log.info("member of a cluster", extra={"cluster": me.cluster, "node": me.node})
    return trust


async def _join_or_stay(token: str, name: str, directory: Path) -> NodeTrust:
    """Join the cluster of `token`. A machine that belongs to it already needs no valid token. Raises as `join`."""
    try:
        return await _join(token, name, directory)
    except (AccessError, WorkerLostError, DeadlineError) as error:
        trust = NodeTrust.load(directory)
        if trust is None or trust.identity.cluster != JoinToken.parse(token).cluster:
            raise
        log.warning("a member of this cluster already", extra={"token": str(error)})
        return trust


async def join_now(options: WorkerOptions) -> None:
    """Join the cluster of `options.join`, and keep where the worker will listen. Raises the errors of a join."""
    assert options.join is not None
    state = state_dir(options.state_dir)
    await _join(options.join, options.own_name, state / CREDENTIALS)
    _record_join(options)


def _record_join(options: WorkerOptions) -> None:
    """Keep where the worker listens, and the address of the coordinator that it joined, if on another machine."""
    state, token = state_dir(options.state_dir), JoinToken.parse(options.join or "")
    write_private(state / LAST_LISTEN, options.listen or EVERYWHERE)
    if host_of(token.address) not in own_addresses():
        write_private(state / COORDINATOR, json.dumps({"join": token.address}))


async def _join(token: str, name: str, directory: Path) -> NodeTrust:
    trust = await join(JoinToken.parse(token), name, directory)
    log.info("joined", extra={"cluster": trust.identity.cluster, "node": trust.identity.node})
    return trust


@asynccontextmanager
async def served(node: WorkerNode, host: str, port: int = 0, data_port: int = 0) -> AsyncIterator[int]:
    """Serve the calls and data connections of `node`, and yield the port of the calls. Raises UsageError."""
    flags = f"--listen {join_address(host, port)}"
    with bind_listener(flags, host, port) as probe:  # gRPC would not say why it cannot listen
        address = probe.getsockname()[0]
    server = make_server(node)
    try:
        port = add_port(server, join_address(address, port), node.identity.trust)
        # gRPC listens on all addresses of both families for 0.0.0.0. The system does not choose its port again.
        both = address == UNSPECIFIED[0] and socket.has_dualstack_ipv6()
        listener = bind_listener(f"--data-port {data_port}", "::" if both else address, data_port)
    except (RuntimeError, UsageError) as error:
        await server.stop(0)
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{flags}: another program listens there. Choose another port") from error
    await server.start()
    data = DataPort(listener, node.tickets.accept)
    data.start()
    node.tickets.port = data.port
    try:
        yield port
    finally:
        await server.stop(STOP_SECONDS)
        await data.close()


POLL_SECONDS = 0.5
"""Seconds between two looks for a coordinator while none uses this worker."""

DRAIN_SECONDS = 20.0
"""Seconds. Maximum wait for the coordinator to plan without this worker before the process ends."""


async def run(options: WorkerOptions) -> None:
    """Serve until SIGTERM or SIGINT, then drain and end. Raises UsageError for options that cannot be used."""
    if options.member:
        await _run_member(options)
        return
    if options.listen is None:
        known = read_text(state_dir(options.state_dir) / LAST_LISTEN)
        options = replace(options, listen=EVERYWHERE if options.join else known)
    follows = options.listen is None and not options.insecure
    address = join_address(*options.address)
    holder = {"name": options.own_name, "address": address, "pid": os.getpid(), "owned": options.owned}
    claim_memory(state_dir(options.state_dir), holder, shared=options.memory_limit is not None)
    identity, stopping = _identity(options), asyncio.Event()
    if options.owned:
        loop = asyncio.get_running_loop()
        when_stdin_ends(partial(loop.call_soon_threadsafe, stopping.set))
    models = identity.models
    if models.own is not None:
        checkpoint, _ = models.open(models.own)
        if options.layers is not None:
            options.layers.check_within(checkpoint.config.num_layers)
    (_, port), given = options.address, options.state_dir
    with keep_awake(enabled=not options.allow_sleep):
        while not stopping.is_set():
            known = read_text(state_dir(given) / LOCAL_TOKEN)
            host, _ = parse_address("--listen", LOOPBACK) if follows else options.address
            identity.trust = await worker_trust(host, identity.name, options.join, given, insecure=options.insecure)
            if follows:
                host = cluster_host(known) if identity.trust else host
                options = replace(options, listen=join_address(host, port))
            if options.join:
                _record_join(options)
            identity.direct = options.direct_host()
            identity.member_flags = options.member_flags(
                models.own, identity.memory_limit, secured=identity.trust is not None
            )
            port = await _serve(identity, options, port, stopping, known, follows=follows)


def cluster_host(local_token: str | None) -> str:
    """Return the host where a worker without --listen listens for the cluster of `local_token`.

    It is the address of this machine at which others join, since their workers connect to this one, or else loopback.
    """
    host, _ = parse_address("--listen", LOOPBACK)
    with contextlib.suppress(UsageError):  # of another release
        joins_at, _ = parse_address("--join", JoinToken.parse(local_token or "").address)
        host = joins_at if joins_at in own_addresses() else host
    return host


def _identity(options: WorkerOptions, trust: NodeTrust | None = None) -> Identity:
    own = find_model(options.model) if options.model is not None else None
    if options.model is not None and own is None:
        log.info(
            "the model is not on this machine. Its layers will be fetched when a coordinator serves it",
            extra={"model": options.model},
        )
    return Identity(
        options.own_name,
        options.layers,
        checked_memory_limit(options.memory_limit),
        LocalModels(own),
        trust=trust,
        machine=MachineOptions(not options.no_wired_memory, options.kernels, options.state_dir),
        disk=open_index(options.state_dir, options.prefix_disk),
    )


FIRST_LEASE_SECONDS = 30.0
"""Seconds in which the coordinator must take the lease of a process for a group."""


async def _run_member(options: WorkerOptions) -> None:
    """Serve the stage of a group until the lease ends, in a process that the worker has started."""
    if not await asyncio.to_thread(sys.stdin.readline):
        return  # the worker has ended, or needs this process no more
    credentials = state_dir(options.state_dir) / CREDENTIALS
    trust = None if options.insecure else NodeTrust.load(credentials)
    node = WorkerNode(_identity(options, trust))
    await node.host.thread.call(partial(set_limits, node.identity.memory_limit))
    first = options.data_port  # of three ports, 0 for any
    async with served(node, options.address[0], first, first and first + 1) as port:
        address = group_address(options.direct_host(), first and first + 2)
        report_ready(port, address, options.rdma)
        due = time.monotonic() + FIRST_LEASE_SECONDS
        while not node.released.is_set() and (node.lease is not None or time.monotonic() < due):
            await _wait_for(node.released, node)
            node.release_lapsed()
    os._exit(0)  # the engine thread may wait in a collective


async def _serve(
    identity: Identity,
    options: WorkerOptions,
    port: int,
    stopping: asyncio.Event,
    known: str | None,
    *,
    follows: bool,
) -> int:
    """Serve until `stopping`, which SIGTERM and SIGINT set, then drain. Return the port.

    Return earlier, while no coordinator uses this worker, if it can join a cluster, or with `follows` if it must listen
    at another address for it. That is when another token than `known` lies in the state directory, because a
    coordinator of its user has started on this machine.
    """
    host, _ = options.address
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    joins = identity.trust is None and not options.insecure
    node = WorkerNode(identity)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(node.close)
        await node.host.thread.call(partial(set_limits, identity.memory_limit))
        identity.bytes_per_second = await node.host.thread.call(measured_bandwidth)
        port = await stack.enter_async_context(served(node, host, port, options.data_port))
        if not options.no_mdns:
            me = identity.trust.identity if identity.trust else None
            trust = (me.cluster, me.node) if me else ()
            announcement = Announcement(identity.id, identity.name, port, *trust)
            await stack.enter_async_context(announced(announcement, host))
        address, layers = join_address(host, port), str(options.layers or "any")
        ready = {"worker": identity.name, "address": address, "data_port": node.tickets.port}
        log.info("worker ready", extra={**ready, "layers": layers})
        advice = "Start one with: mtp-coord serve --model MODEL" + (f" --worker {address}" if options.no_mdns else "")
        if joins:
            advice += f". If one runs, and no line here names a reason, restart this worker with {JOIN_FLAG}"
        state = state_dir(options.state_dir)
        advisor = Advisor(state / COORDINATOR, identity.trust, advice)
        while not stopping.is_set():
            if node.lease is not None:
                advisor.record_coordinator(node.lease.name)
            else:
                token = read_text(state / LOCAL_TOKEN) if joins or follows else None
                if token and token != known and (joins or cluster_host(token) != host):
                    return port
                await advisor.advise()
            await _wait_for(stopping, node)
        await _drain(node)
    return port


async def _wait_for(event: asyncio.Event, node: WorkerNode) -> None:
    """Wait for `event`, at most POLL_SECONDS. Raises WorkerLostError if the engine thread has ended."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), POLL_SECONDS)
    if not node.host.thread.alive:
        raise WorkerLostError("the engine thread has ended: the log has its error. Start the worker again")


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
