"""The parts of a tool call while its text streams, and the interface of the parsers that make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CallStart:
    """The beginning of a tool call, after its name is complete."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next part of the arguments' JSON text. The parts of a complete call form one JSON object."""

    json: str


@dataclass(frozen=True)
class CallEnd:
    """The end of a tool call. `complete` is False for a call that was cut off or cannot be parsed."""

    complete: bool


CallPart = CallStart | CallArguments | CallEnd


class CallParser(Protocol):
    """The incremental parser of the text after one start marker.

    `done` is True after the end marker, `rest` is then the text after the marker. `broken` is True if a part of the
    text is not a call.
    """

    done: bool
    broken: bool
    rest: str

    def add(self, text: str) -> list[CallPart]:
        """Add `text` and return the parts that became final with it."""
        ...

    def finish(self) -> list[CallPart]:
        """Return the parts held back, after the last text. `broken` is True if a call is not complete."""
        ...


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return place and text of the marker that begins first in `text`, or None."""
    found = [(at, marker) for marker in markers if marker and (at := text.find(marker)) >= 0]
    return min(found, default=None)
