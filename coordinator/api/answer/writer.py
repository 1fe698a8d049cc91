"""The seam between delivery and the dialects: a writer translates answer events to the bytes of a response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from coordinator.api.answer.events import AnswerEvent
from coordinator.text.model_info import Json

EVENT_STREAM = "text/event-stream"

_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class AnswerWriter(Protocol):
    """The format of one answer, whole or streamed. Bytes of one call are sent in one write."""

    media_type: str

    def whole(self) -> Json:
        """Return the body of a complete answer that is not streamed."""
        ...

    def opening(self) -> bytes:
        """Return the start of a stream."""
        ...

    def write(self, events: Sequence[AnswerEvent]) -> bytes:
        """Return the bytes of `events`."""
        ...

    def progress(self, done: int, total: int) -> bytes:
        """Return a sign of life while the prompt is computed: `done` of `total` tokens."""
        ...

    def keep_alive(self) -> bytes:
        """Return a sign of life while there is nothing to send."""
        ...

    def closing(self) -> bytes:
        """Return the end of a stream, after every choice has ended."""
        ...

    def error(self, error: Exception) -> bytes:
        """Return the end of a stream that failed."""
        ...


def sse_data(data: Json) -> bytes:
    """Return one server-sent event without a name."""
    return b"data: " + _dumps(data).encode() + b"\n\n"


def sse_event(name: str, data: Json) -> bytes:
    """Return one server-sent event named `name`."""
    return b"event: " + name.encode() + b"\n" + sse_data(data)


def sse_comment(text: str) -> bytes:
    """Return a comment of an event stream, which clients ignore."""
    return f": {text}\n\n".encode()


def json_line(data: Json) -> bytes:
    """Return `data` as one line of JSON."""
    return _dumps(data).encode() + b"\n"
