"""The frames of a data connection: the thread that reads them, the writer, and the outgoing link of a stage."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from proto.errors import ClusterError, DeadlineError, ProtocolError, WorkerLostError
from proto.frame import MAX_MESSAGE_BYTES
from proto.rpc.channels import open_channel
from proto.rpc.data_connection import FRAMES, HopFigures, StreamBinding, TicketOffer, dial_on_thread, shut_down
from proto.rpc.status_codes import from_status
from proto.trust.node_trust import NodeTrust

log = logging.getLogger(__name__)

SMALL_BYTES = 2**16
"""Bytes. Frames that fit into this buffer arrive with one call of the system."""

PIECE_BYTES = 2**22
"""Bytes. A longer frame gets memory in pieces as its bytes arrive, so a length alone reserves nothing."""

OnFrame = Callable[[bytes | bytearray], None]


class FrameBuffer:
    """The bytes of frames as they arrive. Receive into `room`, then call `add_received`."""

    def __init__(self) -> None:
        self._small = bytearray(SMALL_BYTES)
        self._held = 0
        self.long: bytearray | None = None
        """The first bytes of a frame that is longer than SMALL_BYTES, until it is complete."""
        self._got = self._wanted = 0

    def room(self) -> memoryview:
        """Return the memory for the next bytes. Release it before the next call."""
        if self.long is None:
            return memoryview(self._small)[self._held :]
        if self._got == len(self.long):
            self.long.extend(bytes(min(PIECE_BYTES, self._wanted - self._got)))
        return memoryview(self.long)[self._got :]

    def add_received(self, count: int) -> list[bytes | bytearray]:
        """Return the frames that are complete with `count` more bytes. Raises ProtocolError for an invalid length."""
        if self.long is not None:
            self._got += count
            if self._got < self._wanted:
                return []
            data, self.long = self.long, None
            return [data]
        self._held += count
        found: list[bytes | bytearray] = []
        start = 0
        while self._held - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._small, start)
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a frame of {length} bytes, limit {MAX_MESSAGE_BYTES}")
            body = start + LENGTH.size
            if body + length <= self._held:
                found.append(bytes(memoryview(self._small)[body : body + length]))
                start = body + length
                continue
            if LENGTH.size + length > SMALL_BYTES:
                self._got, self._wanted = self._held - body, length
                self.long = bytearray(min(length, max(PIECE_BYTES, self._got)))
                self.long[: self._got] = memoryview(self._small)[body : self._held]
                start = self._held
            break
        if start:
            rest = self._small[start : self._held]
            self._small[: len(rest)] = rest
            self._held = len(rest)
        return found


class FrameReader:
    """A thread that calls `on_frame` with every frame of `connection`. Construct it on the event loop.

    The result of `ended` is None when the peer ends the connection, or the ClusterError that `on_frame` raised.
    """

    def __init__(self, connection: socket.socket, on_frame: OnFrame) -> None:
        self._connection = connection
        self._on_frame = on_frame
        self._buffer = FrameBuffer()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[ClusterError | None] = self._loop.create_future()
        self._start()

    def close(self) -> None:
        """End the connection. The thread then ends."""
        shut_down(self._connection)

    def _start(self) -> None:
        self._connection.setblocking(True)
        threading.Thread(target=self._run, name="frame reader", daemon=True).start()

    def _run(self) -> None:
        # Each call ends with a wait for Python's lock. So one call takes the rest of a long frame, except over TLS.
        whole = 0 if isinstance(self._connection, ssl.SSLSocket) else socket.MSG_WAITALL
        error: ClusterError | None = None
        try:
            while self._receive(whole if self._buffer.long is not None else 0):
                pass
        except OSError:
            pass  # the call of this connection has the cause
        except Exception as failure:
            error = _failure_of(failure)
        finally:
            self._connection.close()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: ClusterError | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    def _receive(self, flags: int = 0) -> bool:
        """Receive once, and pass on the frames that are complete. Return False at the end of the connection."""
        with self._buffer.room() as room:
            count = self._connection.recv_into(room, 0, flags)
        for data in self._buffer.add_received(count) if count else ():
            self._on_frame(data)
        return count > 0


class LoopFrameReader(FrameReader):
    """A reader that calls `on_frame` on the event loop."""

    def close(self) -> None:
        self._end(None)

    def _start(self) -> None:
        self._connection.setblocking(False)
        self._loop.add_reader(self._connection, self._read)

    def _end(self, error: ClusterError | None) -> None:
        if not self.ended.done():
            self._loop.remove_reader(self._connection)
            self._connection.close()
            self.ended.set_result(error)

    def _read(self) -> None:
        """Read until the socket is empty, because TLS may hold bytes that the system does not announce."""
        try:
            while not self.ended.done() and self._receive():
                pass
            self._end(None)
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except OSError:
            self._end(None)
        except Exception as error:
            self._end(_failure_of(error))


LENGTH = struct.Struct("<I")

DIRECT_BYTES = 2**18
"""Bytes. Longest frame that its sender writes itself: 13 rows of a large model, whose copy takes some .05 ms."""

SLOWEST_LINK = 4e6
"""Bytes per second of a bad wireless link. It extends the timeout by five seconds for a frame of 20 MB."""

OnWritten = Callable[[], None]
Parts = tuple[memoryview, ...]
"""The rest of a frame, as parts that follow each other on the wire."""


@dataclass(eq=False)
class FrameWriter:
    """The writer of frames to `peer` over `connection`. Construct it on the event loop.

    It reports failure once, by `on_failure` on the event loop: DeadlineError if the socket does not accept a frame
    within `timeout`, and otherwise WorkerLostError.
    """

    connection: socket.socket
    peer: str
    timeout: float
    on_failure: Callable[[ClusterError], None]

    def __post_init__(self) -> None:
        self.connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        """Guards all that follows, and the socket while `_writing_since` is None."""
        self._queue: deque[tuple[Parts, OnWritten]] = deque()
        self._writing_since: float | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def send(self, data: bytes, on_written: OnWritten, tensor: memoryview | bytes = b"") -> None:
        """Write an encoded frame, or queue it. Any thread may call it; it never waits for the peer.

        `tensor` follows `data` on the wire. A long one is not copied, so it must not change. `on_written` is called, on
        any thread, once the socket has accepted the frame.
        """
        size = len(data) + len(tensor)
        message = LENGTH.pack(size) + data
        direct = size <= DIRECT_BYTES
        if direct and tensor:
            message, tensor = b"".join((message, tensor)), b""
        count = 0
        with self._changed:
            if self._closed:
                return
            if self._writing_since is None and not self._queue and direct:
                try:
                    count = _write_some(self.connection, message)
                except OSError as error:
                    self._fail(_lost(self.peer, error))
                    return
            if count < len(message) or tensor:
                parts = (memoryview(message)[count:], memoryview(tensor))
                self._queue.append((parts, on_written))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._drain, name="frame writer", daemon=True)
                    self._thread.start()
                self._changed.notify()
                return
        on_written()

    @property
    def stall(self) -> float:
        """Seconds since the current write began; 0 while no write is in progress."""
        since = self._writing_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """End the connection. Frames that wait are dropped."""
        with self._changed:
            self._end()

    def _end(self) -> bool:
        """Do the work of `close`. Return False if that was done before."""
        if self._closed:
            return False
        self._closed = True
        self._queue.clear()
        shut_down(self.connection)
        if self._thread is None:
            self.connection.close()
        self._changed.notify()
        return True

    def _drain(self) -> None:
        """Write queued frames until the writer is closed. Runs on the writer's thread."""
        try:
            while (item := self._next_item()) is not None:
                parts, on_written = item
                self._write(parts)
                on_written()
                del item, parts  # a tensor must not stay in memory until the next frame
        except Exception as error:
            with self._changed:
                self._fail(_failure_of(error))
        finally:
            with self._changed:
                self._closed = True
                self._writing_since = None
            self.connection.close()

    def _next_item(self) -> tuple[Parts, OnWritten] | None:
        with self._changed:
            self._writing_since = None
            while not self._queue and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            self._writing_since = time.monotonic()
            return self._queue.popleft()

    def _write(self, parts: Parts) -> None:
        due = time.monotonic() + self.timeout + sum(map(len, parts)) / SLOWEST_LINK
        poll = select.poll()
        poll.register(self.connection, select.POLLOUT)
        try:
            for part in parts:
                data = part
                while data:
                    if count := _write_some(self.connection, data):
                        data = data[count:]
                    elif (left := due - time.monotonic()) <= 0 or not poll.poll(1000 * left):
                        late = f"{self.peer} accepted no frame for {self.timeout:g} s"
                        raise DeadlineError(late)
        except OSError as error:
            raise _lost(self.peer, error) from error

    def _fail(self, error: ClusterError) -> None:
        if not self._end():
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.on_failure, error)


def _failure_of(error: Exception) -> ClusterError:
    """Return the error that ends a connection, for a bug too: its frames must not be lost without one."""
    if isinstance(error, ClusterError):
        return error
    log.error("a data connection failed", exc_info=error)
    return ProtocolError(f"{type(error).__name__}: {error}")


def _write_some(connection: socket.socket, data: bytes | memoryview) -> int:
    try:
        return connection.send(data)
    except (BlockingIOError, ssl.SSLWantWriteError):
        return 0


def _lost(peer: str, error: OSError) -> WorkerLostError:
    return WorkerLostError(f"{peer} is lost: {error.strerror or error}")


Call = grpc.aio.StreamStreamCall[bytes, bytes] | grpc.aio.UnaryStreamCall[bytes, bytes]
"""A call that opens a data connection, and that carries its status."""

CLOSE_SECONDS = 1.0
"""Seconds. Maximum wait for the status of a call after its connection has ended, and for the tasks of a link to end."""


async def open_connection(
    call: Call, address: str, trust: NodeTrust | None, node: str, timeout: float
) -> tuple[socket.socket, HopFigures]:
    """Open the data connection of `call`, and return it with the figures of the hop. Raises the worker's refusal."""
    try:
        async with asyncio.timeout(timeout):
            metadata = await call.initial_metadata()
    except TimeoutError:
        raise DeadlineError(f"a stream to {address} timed out after {timeout:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise await _status_of(call, address) from error
    if call.done():  # refused: the worker sent a status instead
        raise await _status_of(call, address)
    return await dial_on_thread(address, trust, node, TicketOffer.from_metadata(metadata), timeout)


async def end_of_connection(call: Call, address: str, ended: asyncio.Future[ClusterError | None]) -> ClusterError:
    """Wait for the end of `call` or of its data connection, whose error is the result of `ended`. Return the cause."""
    status = asyncio.create_task(_status_of(call, address))
    try:
        both: set[asyncio.Future[Any]] = {status, ended}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        error = ended.result() if ended.done() else None
        if error is not None and not isinstance(error, WorkerLostError):
            return error
        # A worker that refuses or ends a connection closes the call too. Its status says why.
        await asyncio.wait({status}, timeout=CLOSE_SECONDS)
        if status.done():
            return status.result()
        return error or WorkerLostError(f"{address} ended the connection")
    finally:
        status.cancel()
        await asyncio.wait({status}, timeout=CLOSE_SECONDS)


async def _status_of(call: Call, address: str) -> ClusterError:
    code = await call.code()
    details, trailing = await call.details(), await call.trailing_metadata()
    return from_status(code.name, details, trailing, address)


@dataclass(eq=False)
class Link:
    """The sender of frames to `address`, with `trust` to node `node`. It calls `on_failure` once, on the event loop."""

    address: str
    binding: StreamBinding
    timeout: float
    on_failure: Callable[[ClusterError], None]
    trust: NodeTrust | None = None
    node: str = ""

    def __post_init__(self) -> None:
        # A separate connection for each plan: a new plan must not reuse a connection that has silently died.
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channel = open_channel(self.address, self.trust, self.node, options)
        self._writer: FrameWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> HopFigures:
        """Open the call and its data connection, and return the figures of the hop. Raises the worker's refusal."""
        channel = self._channel
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(FRAMES)
        # Kept by no attribute: as long as a call exists, gRPC keeps its connection, although the channel is closed.
        call = method(metadata=self.binding.to_metadata())
        connection, figures = await open_connection(call, self.address, self.trust, self.node, self.timeout)
        broken: asyncio.Future[ClusterError | None] = asyncio.get_running_loop().create_future()
        self._writer = FrameWriter(connection, self.address, self.timeout, broken.set_result)
        self._task = asyncio.create_task(self._watch(call, broken), name=f"link to {self.address}")
        return figures

    def send(self, data: bytes, on_written: Callable[[], None], tensor: memoryview | bytes = b"") -> None:
        """Write or queue an encoded frame. Any thread may call it; see FrameWriter."""
        assert self._writer is not None, "the link is open"
        self._writer.send(data, on_written, tensor)

    @property
    def stall(self) -> float:
        """Seconds since the current write began; 0 while no write is in progress."""
        return 0.0 if self._writer is None else self._writer.stall

    async def close(self) -> None:
        """End the hop and close its connections."""
        if self._task is not None:
            self._task.cancel()
        if self._writer is not None:
            self._writer.close()  # before any wait, which the end of the event loop may cut
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=2 * CLOSE_SECONDS)
            self._task = None  # the traceback of its cancellation refers to the call
        await self._channel.close()

    async def _watch(self, call: Call, broken: asyncio.Future[ClusterError | None]) -> None:
        """Report the failure of the call or of a write."""
        self.on_failure(await end_of_connection(call, self.address, broken))
