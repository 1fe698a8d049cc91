"""Frames over data connections: whole and in order, with deadlines, bounds, and links that are given up."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc.aio
import psutil
import pytest

from proto.errors import ClusterError, DeadlineError, ProtocolError, WorkerLostError
from proto.frame import MAX_MESSAGE_BYTES
from proto.rpc import data_connection
from proto.rpc.data_connection import (
    BURSTS,
    FRAMES,
    SERVICE,
    TICKET_BYTES,
    DataTickets,
    HopFigures,
    StreamBinding,
    TicketOffer,
    answer_probes,
    measure_hop,
)
from proto.rpc.link import (
    DIRECT_BYTES,
    LENGTH,
    PIECE_BYTES,
    SMALL_BYTES,
    FrameBuffer,
    FrameReader,
    FrameWriter,
    Link,
    LoopFrameReader,
)

DEADLINE = 20.0
SIZES = (0, 1, 20, SMALL_BYTES - LENGTH.size, SMALL_BYTES, 5 * PIECE_BYTES // 2, 3)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return two connected sockets."""
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("port", ["", "0", "65536", "-1", "1e3", "9" * 30])
def test_an_offer_names_a_port(port: str) -> None:
    """An offer of a ticket survives its way through metadata, and one without a valid port is refused."""
    offer = TicketOffer(bytes(TICKET_BYTES), 50506)
    metadata = offer.to_metadata()
    assert TicketOffer.from_metadata(metadata) == offer
    changed = [(key, port if value == "50506" else value) for key, value in metadata]
    with pytest.raises(ProtocolError, match="port"):
        TicketOffer.from_metadata(changed)


def frames_of(data: bytes, most: int) -> list[bytes]:
    """Return the frames of `data` that arrives in pieces of at most `most` bytes."""
    buffer, found = FrameBuffer(), []
    while data:
        with buffer.room() as room:
            count = min(most, len(room), len(data))
            room[:count] = data[:count]
        data = data[count:]
        found += [bytes(frame) for frame in buffer.add_received(count)]
    return found


@pytest.mark.parametrize("most", [1, 7, SMALL_BYTES, 2**30])
def test_frames_arrive_whole_however_they_are_cut(most: int) -> None:
    """A reader returns the frames that were sent, in order, for any division of the bytes."""
    sizes = SIZES if most > 100 else (0, 1, 20, 300, 3)
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]
    assert frames_of(b"".join(LENGTH.pack(len(f)) + f for f in sent), most) == sent


def test_a_length_reserves_no_memory() -> None:
    """A frame gets memory as its bytes arrive, and a length above the limit is refused."""
    buffer = FrameBuffer()
    with buffer.room() as room:
        room[:4] = LENGTH.pack(MAX_MESSAGE_BYTES)
    assert buffer.add_received(4) == []
    with buffer.room() as room:
        assert len(room) == PIECE_BYTES
    with FrameBuffer().room() as room:
        assert len(room) == SMALL_BYTES
    with pytest.raises(ProtocolError, match="limit"):
        frames_of(LENGTH.pack(MAX_MESSAGE_BYTES + 1), 4)


@pytest.mark.parametrize("kind", [FrameReader, LoopFrameReader])
async def test_long_and_short_frames_keep_their_order(
    kind: type[FrameReader] | type[LoopFrameReader], pair: tuple[socket.socket, socket.socket]
) -> None:
    """Frames that the sender writes itself never overtake those that wait, and each is reported as written once."""
    sent = [bytes([n % 251]) * (2_000_000 if n % 5 == 0 else 100) for n in range(40)]
    received: list[bytes] = []
    written: list[int] = []
    failures: list[ClusterError] = []
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def on_frame(data: bytes | bytearray) -> None:
        received.append(bytes(data))
        if len(received) == len(sent):
            loop.call_soon_threadsafe(done.set)

    reader = kind(pair[0], on_frame)
    writer = FrameWriter(pair[1], "peer", DEADLINE, failures.append)
    for number, data in enumerate(sent):
        writer.send(data, lambda number=number: written.append(number))  # type: ignore[misc]
        await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE):
        await done.wait()
        assert received == sent
        writer.close()
        await reader.ended
    assert written == list(range(len(sent)))
    assert not failures
    reader.close()


@pytest.mark.parametrize("tensor", [0, 10, DIRECT_BYTES, 3_000_000])
async def test_a_tensor_follows_its_header(tensor: int, pair: tuple[socket.socket, socket.socket]) -> None:
    """A frame in two parts arrives as one, between frames in one part."""
    loop = asyncio.get_running_loop()
    received: asyncio.Queue[bytes] = asyncio.Queue()

    def on_frame(data: bytes | bytearray) -> None:
        loop.call_soon_threadsafe(received.put_nowait, bytes(data))

    reader = FrameReader(pair[0], on_frame)
    writer = FrameWriter(pair[1], "peer", DEADLINE, lambda error: None)
    values = memoryview(bytes(range(1, 251)) * (tensor // 250 + 1))[:tensor]
    for _ in range(2):
        writer.send(b"header", lambda: None, values)
        writer.send(b"next", lambda: None)
    async with asyncio.timeout(DEADLINE):
        found = [await received.get() for _ in range(4)]
    assert found == 2 * [b"header" + bytes(values), b"next"]
    writer.close()
    reader.close()


async def test_a_peer_that_accepts_nothing_is_late(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """A full socket blocks no sender. The writer counts the wait and reports DeadlineError once."""
    failures: asyncio.Queue[ClusterError] = asyncio.Queue()
    writer = FrameWriter(pair[1], "peer", 2.0, failures.put_nowait)
    started = time.monotonic()
    for _ in range(5):
        writer.send(bytes(2**20), lambda: None)
    assert time.monotonic() - started < 1.5, "the sender waited"
    assert writer._queue
    async with asyncio.timeout(8.0):
        assert isinstance(await failures.get(), DeadlineError)
    writer.send(b"dropped", lambda: None)
    await asyncio.sleep(0.05)
    assert failures.empty()
    writer.close()


async def test_a_peer_that_left_is_lost(pair: tuple[socket.socket, socket.socket]) -> None:
    """A closed connection fails the next frame with WorkerLostError, and ends its reader without an error."""
    failures: asyncio.Queue[ClusterError] = asyncio.Queue()
    writer = FrameWriter(pair[1], "peer", 5.0, failures.put_nowait)
    reader = FrameReader(pair[0], lambda data: None)
    reader.close()
    async with asyncio.timeout(DEADLINE):
        await reader.ended
        writer.send(b"frame", lambda: None)
        assert isinstance(await failures.get(), WorkerLostError)
    writer.close()


@pytest.mark.parametrize("kind", [FrameReader, LoopFrameReader])
@pytest.mark.parametrize("cause", [ProtocolError("the queue is full"), KeyError("the queue is full")])
async def test_a_refused_frame_ends_the_connection(
    kind: type[FrameReader] | type[LoopFrameReader], cause: Exception, pair: tuple[socket.socket, socket.socket]
) -> None:
    """The error of `on_frame` ends the reader with that error, and the connection with it, also that of a bug."""

    def refuse(data: bytes | bytearray) -> None:
        raise cause

    reader = kind(pair[0], refuse)
    pair[1].sendall(LENGTH.pack(1) + b"x")
    async with asyncio.timeout(DEADLINE):
        error = await reader.ended
    assert isinstance(error, ProtocolError)
    assert "queue is full" in str(error)
    pair[1].settimeout(DEADLINE)
    assert await asyncio.to_thread(pair[1].recv, 1) == b""


async def test_a_connection_that_arrives_as_its_call_ends_is_closed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """A call that is cancelled in the moment of the delivery leaves no open socket."""
    with DataTickets(None).issued(None) as ticket:
        waiting = asyncio.create_task(ticket.wait_for_connection())
        await asyncio.sleep(0)
        ticket.connection.set_result(pair[0])
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await asyncio.sleep(0)
    assert pair[0].fileno() == -1


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return both ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), DEADLINE)
        server, _ = listener.accept()
        server.settimeout(DEADLINE)
        with client, server:
            yield client, server


def test_a_hop_has_its_time_and_its_speed(ends: tuple[socket.socket, socket.socket]) -> None:
    """Both sides finish together, and the next byte after the measurement is the client's own."""
    client, server = ends
    with ThreadPoolExecutor() as pool:
        answered = pool.submit(answer_probes, server)
        figures = measure_hop(client)
        answered.result(DEADLINE)
    assert 0 < figures.seconds < 1
    assert 1e6 < figures.bytes_per_second < 1e12
    client.sendall(b"frame")
    assert server.recv(5) == b"frame"


DELAY = 1.0
"""Seconds. Long beside the delays of a busy machine."""


def test_the_time_of_a_hop_is_half_the_way_there_and_back(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hop takes half of the time in which the peer answers. This time is no part of the speed."""
    client, server = ends
    read = data_connection._receive

    def slow(connection: socket.socket, count: int) -> bytes:
        """Delay what the client receives."""
        if connection is client:
            time.sleep(DELAY)
        return read(connection, count)

    monkeypatch.setattr(data_connection, "_receive", slow)
    with ThreadPoolExecutor() as pool:
        answered = pool.submit(answer_probes, server)
        figures = measure_hop(client)
        answered.result(DEADLINE)
    assert DELAY / 2 <= figures.seconds < DELAY
    assert figures.bytes_per_second > BURSTS[0] / DELAY


@pytest.mark.timeout(20)
def test_a_connection_that_ends_ends_the_measurement(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Both sides report it instead of waiting for bytes that cannot come."""
    client, server = ends
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError, match="ended during its handshake"):
        measure_hop(client)
    client.close()
    with pytest.raises((ProtocolError, ConnectionError)):
        answer_probes(server)


@pytest.mark.parametrize("bursts", [(BURSTS[0] + 1,), (*BURSTS, 1)])
def test_a_client_cannot_send_more_than_the_bursts(
    ends: tuple[socket.socket, socket.socket], bursts: tuple[int, ...]
) -> None:
    """A burst that is longer than agreed, and one more burst, end the handshake."""
    client, server = ends
    with ThreadPoolExecutor() as pool:
        answered = pool.submit(answer_probes, server)
        client.sendall(b"???")
        for nbytes in bursts[:-1]:
            client.sendall(struct.pack("<I", nbytes) + bytes(nbytes))
        client.sendall(struct.pack("<I", bursts[-1]))
        with pytest.raises(ProtocolError, match="exceeds"):
            answered.result(DEADLINE)


PATIENCE = 10.0
"""Seconds. Deadline of each wait."""


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Run a server that accepts a stream of frames and keeps it open, and yield its port."""

    async def accept(requests: Any, context: Any) -> AsyncIterator[bytes]:
        await context.send_initial_metadata(TicketOffer(bytes(TICKET_BYTES), 1).to_metadata())
        await asyncio.Event().wait()
        yield b""

    handler: Any = grpc.stream_stream_rpc_method_handler(accept)
    methods: dict[str, Any] = {FRAMES.rpartition("/")[2]: handler}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    found = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield found
    await server.stop(0)


def connections_to(port: int) -> int:
    """Return how many connections this process has to a port."""
    return len([c for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == port])


async def test_a_closed_link_has_no_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The binding of an ended plan may live on, and its connections must not."""
    near, far = socket.socketpair()
    figures = HopFigures(1e-4, 1e9)
    monkeypatch.setattr(data_connection, "dial", lambda *_: (near, figures))
    failures: list[Exception] = []
    link = Link(
        f"127.0.0.1:{port}",
        StreamBinding(1, 1, b"t"),
        timeout=PATIENCE,
        on_failure=failures.append,
    )
    assert await link.open() == figures
    assert connections_to(port) == 1
    await link.close()
    with far:
        far.settimeout(PATIENCE)
        assert far.recv(1) == b"", "the data connection has ended"
    async with asyncio.timeout(PATIENCE):
        while connections_to(port):  # noqa: ASYNC110 (gRPC closes it on a thread)
            await asyncio.sleep(0.02)
    assert not failures


async def test_a_link_that_is_given_up_closes_what_it_dials(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may end while a thread still opens the data connection. The thread closes it."""
    near, far = socket.socketpair()
    dialling, may_return = threading.Event(), threading.Event()

    def dial(*_: object) -> tuple[socket.socket, HopFigures]:
        dialling.set()
        may_return.wait(PATIENCE)
        return near, HopFigures(1e-4, 1e9)

    monkeypatch.setattr(data_connection, "dial", dial)
    binding = StreamBinding(1, 1, b"t")
    link = Link(f"127.0.0.1:{port}", binding, timeout=PATIENCE, on_failure=lambda _: None)
    opening = asyncio.create_task(link.open())
    await asyncio.to_thread(dialling.wait, PATIENCE)
    opening.cancel()
    await asyncio.wait({opening}, timeout=PATIENCE)
    may_return.set()
    with far:
        far.settimeout(PATIENCE)
        assert await asyncio.to_thread(far.recv, 1) == b""
    await link.close()
