"""The cost of mutual TLS per hop: round trips of a 20 KB frame over persistent streams, with and without, in one run.

    python -m tests.bench.tls_hop [--rounds 2000]

Both servers run in one other process. The rounds alternate in blocks, so that a busy machine disturbs both equally. A
hop is half a round trip in which the frame travels both ways.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from coordinator.trust.authority import Authority
from proto.rpc.channels import add_port, open_channel
from proto.rpc.data_plane import CHANNEL_OPTIONS
from proto.trust.identity import Role
from proto.trust.node_trust import NodeTrust
from tests.support.trust.cluster_ca import make_authority, trust_of

METHOD = "/bench.Hop/Echo"
FRAME_BYTES = 20 * 1024
BLOCK = 100


async def serve(authority: Authority, ports: Connection) -> None:
    """Echo messages on two ports, one with TLS and one without, until the process is stopped."""

    async def echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Return each message to its sender."""
        async for message in messages:
            yield message

    found = []
    servers = []
    for trust in (None, trust_of(authority, Role.WORKER)):
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        handlers: dict[str, Any] = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bench.Hop", handlers),)
        )
        found.append(add_port(server, "127.0.0.1:0", trust))
        await server.start()
        servers.append(server)
    ports.send(found)
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


def run_server(folder: str, ports: Connection) -> None:
    """Run `serve` in another process."""
    authority = Authority.open(Path(folder))
    assert authority is not None
    asyncio.run(serve(authority, ports))


async def measure(trusts: list[NodeTrust | None], ports: list[int], rounds: int) -> list[float]:
    """Return the median seconds of a hop for each port."""
    streams: list[Any] = []
    for trust, port in zip(trusts, ports, strict=True):
        channel = open_channel(f"127.0.0.1:{port}", trust)
        streams.append(channel.stream_stream(METHOD)())
    frame = bytes(FRAME_BYTES)
    times: list[list[float]] = [[], []]
    for block in range(-1, rounds // BLOCK):  # the first block warms up
        for stream, seconds in zip(streams, times, strict=True):
            for _ in range(BLOCK):
                started = time.perf_counter()
                await stream.write(frame)
                assert len(await stream.read()) == FRAME_BYTES
                if block >= 0:
                    seconds.append((time.perf_counter() - started) / 2)
    return [statistics.median(seconds) for seconds in times]


def main() -> None:
    """Print the time of a hop with and without TLS."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        authority = make_authority(Path(folder))
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=run_server, args=(folder, there), daemon=True)
        process.start()
        ports: list[int] = here.recv()
        trusts = [None, trust_of(authority, Role.COORDINATOR)]
        plain, secured = asyncio.run(measure(trusts, ports, arguments.rounds))
        process.kill()
    print(
        f"{FRAME_BYTES // 1024} KB frame, {arguments.rounds} rounds: plaintext {plain * 1e6:.0f} us per hop, "
        f"mutual TLS 1.3 {secured * 1e6:.0f} us per hop, difference {(secured - plain) * 1e6:.0f} us"
    )


if __name__ == "__main__":
    main()
