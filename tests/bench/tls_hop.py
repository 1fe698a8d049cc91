"""The time of a hop between two processes, over a data connection and over a gRPC stream, with and without TLS.

    python -m tests.bench.tls_hop
    python -m tests.bench.tls_hop --idle-ms 4 --rounds 300

The other process returns every frame. The kinds alternate in blocks, so that a busy machine disturbs all equally. A hop
is half a round trip in which the frame travels both ways. With `--idle-ms` both processes idle before each round trip,
as they do between two tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import queue
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from coordinator.trust.authority import Authority
from proto.rpc.channels import add_port, open_channel
from proto.rpc.data_plane import CHANNEL_OPTIONS
from proto.rpc.frame_reader import FrameReader
from proto.rpc.frame_writer import FrameWriter
from proto.rpc.tls import client_context, server_context
from proto.trust.identity import Role, host_name
from proto.trust.node_trust import NodeTrust
from tests.bench.machine import about
from tests.support.trust.cluster_ca import make_authority, trust_of

METHOD = "/bench.Hop/Echo"
FRAME_BYTES = (5 * 1024, 20 * 1024)
"""The hidden states of one token of the built-in model in fp32, and of a large model in bf16."""

BLOCK = 50
SECONDS = 60.0
"""Seconds. Deadline of every wait."""

RoundTrip = Callable[[bytes], Any]


def connected(connection: socket.socket, trust: NodeTrust | None, *, server: bool) -> socket.socket:
    """Return the connection as a data connection has it: without delays, and over TLS with `trust`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if trust is None:
        return connection
    if server:
        return server_context(trust).wrap_socket(connection, server_side=True)
    name = host_name(trust.identity.cluster, Role.WORKER)
    return client_context(trust).wrap_socket(connection, server_hostname=name)


def echo_frames(listener: socket.socket, trust: NodeTrust | None, keep: list[Any]) -> None:
    """Return the frames of one data connection over a second one."""
    inward, outward = (connected(listener.accept()[0], trust, server=True) for _ in range(2))
    writer = FrameWriter(outward, "client", SECONDS, keep.append)
    keep += [writer, FrameReader(inward, lambda data: writer.send(bytes(data), _nothing))]


async def serve(authority: Authority, ports: Connection) -> None:
    """Echo messages of all kinds until the process is stopped."""

    async def echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Return each message to its sender."""
        async for message in messages:
            yield message

    keep: list[Any] = []
    found, listeners = [], []
    trusts = (None, trust_of(authority, Role.WORKER))
    for trust in trusts:
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        handlers: dict[str, Any] = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bench.Hop", handlers),)
        )
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        found.append((listeners[-1].getsockname()[1], add_port(server, "127.0.0.1:0", trust)))
        await server.start()
        keep.append(server)
    ports.send(found)
    for listener, trust in zip(listeners, trusts, strict=True):
        echo_frames(listener, trust, keep)
    await asyncio.sleep(3600)


def run_server(folder: str, ports: Connection) -> None:
    """Run `serve` in another process."""
    authority = Authority.open(Path(folder))
    assert authority is not None
    asyncio.run(serve(authority, ports))


def over_data_connection(port: int, trust: NodeTrust | None, keep: list[Any]) -> RoundTrip:
    """Return the round trip of a frame over data connections."""
    outward, inward = (
        connected(socket.create_connection(("127.0.0.1", port), SECONDS), trust, server=False)
        for _ in range(2)
    )
    received: queue.SimpleQueue[bytes | bytearray] = queue.SimpleQueue()
    writer = FrameWriter(outward, "server", SECONDS, keep.append)
    keep += [writer, FrameReader(inward, received.put)]

    async def round_trip(frame: bytes) -> int:
        """Send a frame and wait for it, on a thread that blocks as the engine thread does."""
        writer.send(frame, _nothing)
        return len(received.get(timeout=SECONDS))

    return round_trip


def over_grpc(port: int, trust: NodeTrust | None, keep: list[Any]) -> RoundTrip:
    """Return the round trip of a frame over a gRPC stream."""
    channel = open_channel(f"127.0.0.1:{port}", trust)
    stream: Any = channel.stream_stream(METHOD)()
    keep.append(channel)

    async def round_trip(frame: bytes) -> int:
        """Send a frame and wait for it."""
        await stream.write(frame)
        return len(await stream.read())

    return round_trip


async def measure(
    trusts: list[NodeTrust | None], ports: list[tuple[int, int]], rounds: int, idle: float
) -> dict[tuple[str, int], float]:
    """Return the median seconds of a hop for each kind and size."""
    keep: list[Any] = []
    kinds: dict[str, RoundTrip] = {}
    for trust, (data_port, grpc_port) in zip(trusts, ports, strict=True):
        secured = "plaintext" if trust is None else "mutual TLS"
        kinds[f"data connection, {secured}"] = over_data_connection(data_port, trust, keep)
        kinds[f"gRPC stream, {secured}"] = over_grpc(grpc_port, trust, keep)
    times: dict[tuple[str, int], list[float]] = {}
    for block in range(-1, max(1, rounds // BLOCK)):  # the first block warms up
        for size in FRAME_BYTES:
            frame = bytes(size)
            for kind, round_trip in kinds.items():
                for _ in range(BLOCK):
                    await asyncio.sleep(idle)
                    started = time.perf_counter()
                    assert await round_trip(frame) == size
                    if block >= 0:
                        hop = (time.perf_counter() - started) / 2
                        times.setdefault((kind, size), []).append(hop)
    return {key: statistics.median(found) for key, found in times.items()}


def main() -> None:
    """Print the time of a hop of each kind and size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--idle-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        authority = make_authority(Path(folder))
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=run_server, args=(folder, there), daemon=True)
        process.start()
        ports: list[tuple[int, int]] = here.recv()
        trusts = [None, trust_of(authority, Role.COORDINATOR)]
        found = asyncio.run(measure(trusts, ports, arguments.rounds, arguments.idle_ms / 1000))
        process.kill()
    print(about())
    print(f"{arguments.rounds} round trips, {arguments.idle_ms:g} ms of idling before each")
    for (kind, size), seconds in found.items():
        print(f"{kind:<30} {size // 1024:>3} KB {seconds * 1e6:>6.0f} us per hop")


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
