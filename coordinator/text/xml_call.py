"""The incremental parser of Qwen3.5's XML calls: `<function=NAME>`, then `<parameter=NAME>` for each argument."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from coordinator.text.argument_types import ArgumentTypes, json_of
from coordinator.text.call_parts import (
    CallArguments,
    CallEnd,
    CallPart,
    CallStart,
    first_marker,
)
from coordinator.text.detokenizer import held_back
from coordinator.text.model_info import Json

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class XmlCallParser:
    """The CallParser of the XML form.

    Values of the type string stream while they arrive. Other values are converted to their types when they are
    complete. Inside a value only `</parameter>` has a meaning, so a value may contain the other markers.
    """

    def __init__(self, tools: Sequence[Json], end: str) -> None:
        self.done = False
        self.broken = False
        self.rest = ""
        self._types = ArgumentTypes(tools)
        self._end = end
        self._buffer = ""
        self._read: Callable[[], list[CallPart] | None] = self._read_head
        self._function = ""
        self._parameter = ""
        self._arguments = 0  # of the current call
        self._opened = False  # the opening quote of the current string is sent
        self._calls = 0

    def add(self, text: str) -> list[CallPart]:
        """See CallParser."""
        self._buffer += text
        parts: list[CallPart] = []
        while not self.done and (found := self._read()) is not None:
            parts += found
        return parts

    def finish(self) -> list[CallPart]:
        """See CallParser."""
        if self.done or self.broken:
            return []
        return self._break() if self._open or not self._calls else []

    @property
    def _open(self) -> bool:
        """True between the start and the end of a call."""
        return self._read != self._read_head

    def _read_head(self) -> list[CallPart] | None:
        """Read up to the name of a function, or to the end marker."""
        found = first_marker(self._buffer, (FUNCTION, self._end))
        if found is None:
            return None
        at, marker = found
        if marker == self._end:
            self._take_end(at)
            return [] if self._calls else self._break()
        name = self._read_name(at + len(FUNCTION))
        if name is None:
            return None
        if not name:
            return self._break()
        self._function, self._arguments = name, 0
        self._read = self._read_between
        return [CallStart(name), CallArguments("{")]

    def _read_between(self) -> list[CallPart] | None:
        """Read up to the name of a parameter, or to the end of the function. Other text has no meaning."""
        found = first_marker(self._buffer, (PARAMETER, FUNCTION_END, self._end))
        if found is None:
            return None
        at, marker = found
        if marker == PARAMETER:
            name = self._read_name(at + len(PARAMETER))
            if name is None:
                return None
            comma = ", " if self._arguments else ""
            self._parameter, self._opened = name, False
            self._arguments += 1
            self._read = self._skip_line_break
            return [CallArguments(f"{comma}{json.dumps(name, ensure_ascii=False)}: ")]
        if marker == self._end:
            self._take_end(at)
        else:
            self._buffer = self._buffer[at + len(FUNCTION_END) :]
            self._read = self._read_head
        self._calls += 1
        return [CallArguments("}"), CallEnd(complete=True)]

    def _skip_line_break(self) -> list[CallPart] | None:
        """Drop the line break between a parameter's name and its value."""
        if not self._buffer:
            return None
        self._buffer = self._buffer.removeprefix("\n")
        self._read = self._read_value
        return []

    def _read_value(self) -> list[CallPart] | None:
        at = self._buffer.find(PARAMETER_END)
        kinds = self._types.kinds(self._function, self._parameter)
        if at < 0:
            stringy = "string" in kinds and kinds <= {"string", "null"}
            return self._read_string("null" in kinds) if stringy else None
        value = self._buffer[:at].removesuffix("\n")
        if self._opened:
            text: str | None = _escaped(value) + '"'
        else:
            text = json_of(value, kinds)
        if text is None:
            return self._break()
        self._buffer = self._buffer[at + len(PARAMETER_END) :]
        self._read = self._read_between
        return [CallArguments(text)]

    def _read_string(self, nullable: bool) -> list[CallPart] | None:
        """Return the next part of a string without its end. `null` may be a value of a nullable string."""
        held = held_back(self._buffer, ("\n" + PARAMETER_END, PARAMETER_END))
        text = self._buffer[: len(self._buffer) - held]
        if not text or (nullable and not self._opened and "null".startswith(text)):
            return None
        self._buffer = self._buffer[len(text) :]
        quote, self._opened = "" if self._opened else '"', True
        return [CallArguments(quote + _escaped(text))]

    def _read_name(self, start: int) -> str | None:
        """Return the name at `start` without the text up to its end, or None if it is not complete."""
        ends = [at for at in (self._buffer.find(c, start) for c in ">\n") if at >= 0]
        if not ends:
            return None
        name, self._buffer = self._buffer[start : min(ends)], self._buffer[min(ends) + 1 :]
        return name.strip()

    def _take_end(self, at: int) -> None:
        self.done = True
        self.rest, self._buffer = self._buffer[at + len(self._end) :], ""

    def _break(self) -> list[CallPart]:
        """Give up: the text is not a call. The text up to the end marker belongs to it."""
        was_open = self._open
        self.broken = True
        self._read = self._read_to_end
        return [CallEnd(complete=False)] if was_open else []

    def _read_to_end(self) -> list[CallPart] | None:
        found = self._buffer.find(self._end)
        if found < 0:
            return None
        self._take_end(found)
        return []


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
