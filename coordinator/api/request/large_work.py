"""The work on large requests: one at a time on a thread of its own, and with a bound on its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from proto.errors import CapacityError

R = TypeVar("R")

LARGE_BYTES = 2**16
"""Bytes or characters. The thread for large requests works on longer ones, which take over a few milliseconds."""

MAX_OPEN_BYTES = 128 * 2**20
"""Bytes of large bodies that are read at once: eight of the largest. Parsed, they take about twice as much."""

RETRY_SECONDS = 5.0
"""Seconds after which a client may send a large body again. Reading eight of them takes about as long."""


class LargeWork:
    """The thread for large requests, and the bytes of large bodies that are being read.

    One thread bounds their memory and leaves the processors to the answers of others.
    """

    def __init__(self) -> None:
        self.open_bytes = 0
        self._thread = ThreadPoolExecutor(1, "large request")

    async def run(self, size: int, function: Callable[[], R]) -> R:
        """Return the result of `function`, which works on `size` bytes or characters, from a thread."""
        if size <= LARGE_BYTES:
            return await asyncio.to_thread(function)
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes for a large body. They are free again at the end of the block.

        The function raises CapacityError when large bodies have MAX_OPEN_BYTES already.
        """
        reserved = 0

        def reserve(count: int) -> None:
            """Reserve `count` more bytes."""
            nonlocal reserved
            if self.open_bytes + count > MAX_OPEN_BYTES:
                raise CapacityError(
                    "The server is reading other large requests. Try again later.",
                    retry_after=RETRY_SECONDS,
                )
            self.open_bytes += count
            reserved += count

        try:
            yield reserve
        finally:
            self.open_bytes -= reserved
