"""The parser of call formats without an incremental parser: mlx-lm's parser reads the whole call."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from coordinator.text.call_parts import CallArguments, CallEnd, CallPart, CallStart

log = logging.getLogger(__name__)


class BufferedCallParser:
    """The CallParser that sends calls as a whole after the end marker, or at the end of the text.

    `parse` is mlx-lm's parser for the checkpoint's format. `end` may be empty.
    """

    def __init__(self, parse: Callable[[str], Any], end: str) -> None:
        self.done = False
        self.broken = False
        self.rest = ""
        self._parse = parse
        self._end = end
        self._buffer = ""

    def add(self, text: str) -> list[CallPart]:
        """See CallParser."""
        self._buffer += text
        at = self._buffer.find(self._end) if self._end else -1
        if at < 0:
            return []
        self.done, self.rest = True, self._buffer[at + len(self._end) :]
        return self._calls(self._buffer[:at])

    def finish(self) -> list[CallPart]:
        """See CallParser. A call without its end marker may be complete."""
        return [] if self.done else self._calls(self._buffer)

    def _calls(self, text: str) -> list[CallPart]:
        try:
            found = self._parse(text)
            parts = [
                part
                for call in (found if isinstance(found, list) else [found])
                for part in _parts(call)
            ]
        except Exception:  # mlx-lm's parsers raise errors of many types
            log.debug("tool call not parsed, sent as text", exc_info=True)
            parts = []
        self.broken = not parts
        return parts


def _parts(call: object) -> list[CallPart]:
    """Return the parts of one call. Raises ValueError if it is not a call."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a tool call has a name")
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("a tool call's arguments are an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return [CallStart(call["name"]), CallArguments(text), CallEnd(complete=True)]
