"""The sending end of a data connection. The thread that has a frame writes it to the socket itself.

On the wire each frame follows its length, 4 bytes little endian. A socket that accepts less than the whole frame leaves
the remainder to a thread of the writer, so no sender waits for a slow peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from proto.errors import ClusterError, DeadlineError, WorkerLostError
from proto.rpc.data_socket import shut_down

LENGTH = struct.Struct("<I")

DIRECT_BYTES = 2**18
"""Bytes. Longest frame that its sender writes itself: 13 rows of a large model, whose copy takes some .05 ms."""

SLOWEST_LINK = 4e6
"""Bytes per second of a bad wireless link. It extends the timeout by five seconds for a frame of 20 MB."""

OnWritten = Callable[[], None]
Parts = tuple[memoryview, ...]
"""The rest of a frame, as parts that follow each other on the wire."""


class FrameWriter:
    """The writer of frames to `peer` over `connection`. Construct it on the event loop.

    It reports failure once, by `on_failure` on the event loop: DeadlineError if the socket does not accept a frame
    within `timeout`, and otherwise WorkerLostError.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        timeout: float,
        on_failure: Callable[[ClusterError], None],
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._peer = peer
        self._timeout = timeout
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        """Guards all that follows, and the socket while `_writing_since` is None."""
        self._changed = threading.Condition(self._lock)
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
        with self._lock:
            if self._closed:
                return
            if self._writing_since is None and not self._queue and direct:
                try:
                    count = _write_some(self._connection, message)
                except OSError as error:
                    self._fail(_lost(self._peer, error))
                    return
            if count < len(message) or tensor:
                parts = (memoryview(message)[count:], memoryview(tensor))
                self._queue.append((parts, on_written))
                self._start_thread()
                return
        on_written()

    @property
    def queued(self) -> int:
        """Number of frames that wait to be written."""
        return len(self._queue)

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
        """End the connection and drop the frames that wait. Return False if that was done before."""
        if self._closed:
            return False
        self._closed = True
        self._queue.clear()
        shut_down(self._connection)
        if self._thread is None:
            self._connection.close()
        self._changed.notify()
        return True

    def _start_thread(self) -> None:
        """Wake the thread of this writer, or start it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._drain, name="frame writer", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _drain(self) -> None:
        """Write queued frames until the writer is closed. Runs on the writer's thread."""
        try:
            while (item := self._next_item()) is not None:
                parts, on_written = item
                self._write(parts)
                on_written()
                del item, parts  # a tensor must not stay in memory until the next frame
        except ClusterError as error:
            with self._changed:
                self._fail(error)
        finally:
            with self._changed:
                self._closed = True
                self._writing_since = None
            self._connection.close()

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
        limit = self._timeout + sum(map(len, parts)) / SLOWEST_LINK
        due = time.monotonic() + limit
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        try:
            for part in parts:
                data = part
                while data:
                    if count := _write_some(self._connection, data):
                        data = data[count:]
                    elif (left := due - time.monotonic()) <= 0 or not poll.poll(1000 * left):
                        late = f"{self._peer} accepted no frame for {self._timeout:g} s"
                        raise DeadlineError(late)
        except OSError as error:
            raise _lost(self._peer, error) from error

    def _fail(self, error: ClusterError) -> None:
        if not self._end():
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._on_failure, error)


def _write_some(connection: socket.socket, data: bytes | memoryview) -> int:
    """Return the number of bytes that the socket accepts now."""
    try:
        return connection.send(data)
    except (BlockingIOError, ssl.SSLWantWriteError):
        return 0


def _lost(peer: str, error: OSError) -> WorkerLostError:
    return WorkerLostError(f"{peer} is lost: {error.strerror or error}")
