"""The receiving end of a data connection, on a thread of its own or on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable

from proto.errors import ClusterError, ProtocolError
from proto.frame import MAX_MESSAGE_BYTES
from proto.rpc.data_socket import shut_down
from proto.rpc.frame_writer import LENGTH

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
        self._long: bytearray | None = None
        self._got = self._wanted = 0

    @property
    def in_long_frame(self) -> bool:
        """True if `room` is for the next bytes of a frame that is longer than SMALL_BYTES."""
        return self._long is not None

    def room(self) -> memoryview:
        """Return the memory for the next bytes. Release it before the next call."""
        if self._long is None:
            return memoryview(self._small)[self._held :]
        if self._got == len(self._long):
            self._long.extend(bytes(min(PIECE_BYTES, self._wanted - self._got)))
        return memoryview(self._long)[self._got :]

    def add_received(self, count: int) -> list[bytes | bytearray]:
        """Return the frames that are complete with `count` more bytes. Raises ProtocolError for an invalid length."""
        if self._long is not None:
            self._got += count
            if self._got < self._wanted:
                return []
            data, self._long = self._long, None
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
                self._long = bytearray(min(length, max(PIECE_BYTES, self._got)))
                self._long[: self._got] = memoryview(self._small)[body : self._held]
                start = self._held
            break
        if start:
            rest = self._small[start : self._held]
            self._small[: len(rest)] = rest
            self._held = len(rest)
        return found


class FrameReader:
    """A thread that calls `on_frame` with every frame of `connection`. Construct it on the event loop.

    `ended` completes when the peer ends the connection, or with the ClusterError that `on_frame` raised.
    """

    def __init__(self, connection: socket.socket, on_frame: OnFrame) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="frame reader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection. The thread then ends."""
        shut_down(self._connection)

    def _run(self) -> None:
        error: ClusterError | None = None
        try:
            self._read()
        except ClusterError as failure:
            error = failure
        except OSError:
            pass  # the call of this connection has the cause
        finally:
            self._connection.close()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(end_future, self.ended, error)

    def _read(self) -> None:
        buffer = FrameBuffer()
        # Each call ends with a wait for Python's lock. So one call takes the rest of a long frame, except over TLS.
        whole = 0 if isinstance(self._connection, ssl.SSLSocket) else socket.MSG_WAITALL
        while True:
            flags = whole if buffer.in_long_frame else 0
            with buffer.room() as room:
                count = self._connection.recv_into(room, 0, flags)
            if not count:
                return
            for data in buffer.add_received(count):
                self._on_frame(data)


class LoopFrameReader:
    """A reader like FrameReader that calls `on_frame` on the event loop."""

    def __init__(self, connection: socket.socket, on_frame: OnFrame) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._on_frame = on_frame
        self._buffer = FrameBuffer()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(connection, self._read)

    def close(self) -> None:
        """End the connection."""
        self._end(None)

    def _end(self, error: ClusterError | None) -> None:
        if not self.ended.done():
            self._loop.remove_reader(self._connection)
            self._connection.close()
            end_future(self.ended, error)

    def _read(self) -> None:
        """Read until the socket is empty, because TLS may hold bytes that the system does not announce."""
        try:
            while not self.ended.done():
                with self._buffer.room() as room:
                    count = self._connection.recv_into(room)
                if not count:
                    self._end(None)
                    return
                for data in self._buffer.add_received(count):
                    self._on_frame(data)
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except ClusterError as error:
            self._end(error)
        except OSError:
            self._end(None)


def end_future(future: asyncio.Future[None], error: ClusterError | None) -> None:
    """Complete `future` with `error` or without a result, unless it is done."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # marks it as retrieved
