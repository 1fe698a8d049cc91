"""The open requests of an API and the last ones that ended, without their texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

MAX_RECENT = 50
"""Ended requests kept for a page that opens later."""

MAX_SHOWN = 50
"""Open requests that a message to pages lists. More would not fit on a screen."""


@dataclass
class RequestRecord:
    """One request. Times are seconds; `began_at` is since 1970. `seconds` is None while the request is open.

    `first_token` is the time to the first token, None before it. `outcome` is empty while the request is open.
    """

    number: int
    endpoint: str
    began_at: float
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token: float | None = None
    seconds: float | None = None
    outcome: str = ""


class RequestLog:
    """The open requests and the last MAX_RECENT ended ones. `ended` counts all ended requests since the start."""

    def __init__(self) -> None:
        self.recent: deque[RequestRecord] = deque(maxlen=MAX_RECENT)
        self.ended = 0
        self._begun = 0
        self._open: dict[int, RequestRecord] = {}

    def begin_request(self, endpoint: str, at: float) -> RequestRecord:
        """Add an open request."""
        self._begun += 1
        record = self._open[self._begun] = RequestRecord(self._begun, endpoint, round(at, 2))
        return record

    def end_request(self, record: RequestRecord, outcome: str, seconds: float) -> None:
        """Move a request to the ended ones."""
        record.outcome, record.seconds = outcome, round(seconds, 3)
        del self._open[record.number]
        self.recent.append(record)
        self.ended += 1

    def open_requests(self) -> list[RequestRecord]:
        """Return the oldest MAX_SHOWN open requests."""
        return list(self._open.values())[:MAX_SHOWN]

    def ended_since(self, count: int) -> Iterable[RequestRecord]:
        """Return the requests that ended after the first `count`, as far as they are kept."""
        new = min(self.ended - count, len(self.recent))
        return [self.recent[i] for i in range(len(self.recent) - new, len(self.recent))]
