"""The numbered events of one stored stream, which several clients may follow from any number on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence


class EventLog:
    """The events of a stream, numbered from 0. With `answer_id` each event carries `ANSWER_ID:NUMBER` as its SSE id.

    `events` are those of a stream that has ended.
    """

    def __init__(self, answer_id: str = "", events: Sequence[bytes] = ()) -> None:
        self.events: list[bytes] = list(events)
        self._answer_id = answer_id
        self._ended = bool(events)
        self._last = b""
        self._sign = b""
        self._signs = 0
        self._changed = asyncio.Event()

    def append(self, content: bytes) -> None:
        """Append the events in `content`. Comments get no number: they are signs of life for the present clients."""
        for block in content.split(b"\n\n"):
            if block.startswith(b":"):
                self._sign, self._signs = block + b"\n\n", self._signs + 1
            elif block:
                number = len(self.events)
                name = f"id: {self._answer_id}:{number}\n".encode() if self._answer_id else b""
                self.events.append(name + block + b"\n\n")
        self._wake_followers()

    def end(self, last: bytes = b"") -> None:
        """End the stream. `last` is sent to the present clients and has no number."""
        self._ended, self._last = True, last
        self._wake_followers()

    async def follow(
        self, after: int, keep_alive: bytes, seconds: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events after number `after` until the end, and `keep_alive` after `seconds` of silence."""
        position, signs = after + 1, self._signs
        while True:
            changed = self._changed
            if position < len(self.events):
                content = b"".join(self.events[position:])
                position = len(self.events)
                yield content
            elif self._ended:
                if self._last:
                    yield self._last
                return
            elif signs < self._signs:
                signs = self._signs
                yield self._sign
            else:
                try:
                    async with asyncio.timeout(seconds):
                        await changed.wait()
                except TimeoutError:
                    yield keep_alive

    def _wake_followers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
