"""The parsers of tool calls: Qwen3.5's XML form, which streams, and Hermes' JSON form.

The XML form is `<function=NAME>`, then `<parameter=NAME>` for each argument. The JSON form is
`{"name": …, "arguments": {…}}`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
"""An object of JSON."""


def held_back(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is the beginning of one of `stops`, but not all of it."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(stop) > length and text.endswith(stop[:length]) for stop in stops):
            return length
    return 0


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


class CallParser:
    """The incremental parser of the text after one start marker, up to the marker `end`.

    `done` is True after the end marker, `rest` is then the text after the marker. `broken` is True if a part of the
    text is not a call. A subclass sets `_read` to the method that reads the next part. The method returns None if the
    text so far does not suffice.
    """

    _read: Callable[[], list[CallPart] | None]

    def __init__(self, end: str) -> None:
        self.done = False
        self.broken = False
        self.rest = ""
        self._end = end
        self._buffer = ""

    def add_text(self, text: str) -> list[CallPart]:
        """Add `text` and return the parts that became final with it."""
        self._buffer += text
        parts: list[CallPart] = []
        while not self.done and (found := self._read()) is not None:
            parts += found
        return parts

    def finish(self) -> list[CallPart]:
        """Return the parts held back, after the last text. `broken` is True if a call is not complete."""
        raise NotImplementedError

    def _take_end(self, at: int) -> None:
        self.done = True
        self.rest, self._buffer = self._buffer[at + len(self._end) :], ""

    def _break(self) -> list[CallPart]:
        """Give up: the text is not a call. The text up to the end marker belongs to it."""
        self.broken = True
        self._read = self._read_to_end
        return []

    def _read_to_end(self) -> list[CallPart] | None:
        at = self._buffer.find(self._end)
        if at < 0:
            return None
        self._take_end(at)
        return []


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return place and text of the marker that begins first in `text`, or None."""
    found = [(at, marker) for marker in markers if marker and (at := text.find(marker)) >= 0]
    return min(found, default=None)


Kinds = frozenset[str]
"""Names of JSON Schema's types; empty for a schema that does not say."""

MAX_DEPTH = 8
"""Levels of references and unions that are followed, so that a reference to itself ends."""


class ArgumentTypes:
    """The types that the schemas of tools allow for each argument."""

    def __init__(self, tools: Sequence[Json]) -> None:
        self._parameters: dict[str, Any] = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }

    def declares(self, function: str) -> bool:
        """Return whether the client declared `function`. A call of another one is text."""
        return function in self._parameters

    def kinds(self, function: str, argument: str) -> Kinds:
        """Return the types of an argument. An argument that the schema does not name is a string."""
        root = self._parameters.get(function, {})
        properties = root.get("properties") if isinstance(root, dict) else None
        if not isinstance(properties, dict) or argument not in properties:
            return frozenset({"string"})
        return frozenset(_kinds(properties[argument], root, MAX_DEPTH))


def _kinds(schema: Any, root: Json, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or depth == 0:
        return
    kind = schema.get("type")
    if kind is not None:
        yield from (str(k) for k in (kind if isinstance(kind, list) else [kind]))
        return
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    for value in values if isinstance(values, list) else []:
        yield _kind_of(value)
    for name in ("anyOf", "oneOf"):
        for member in schema.get(name) or ():
            yield from _kinds(member, root, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, dict) else None
        yield from _kinds(target, root, depth - 1)


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def json_of(text: str, kinds: Kinds) -> str | None:
    """Return the JSON of an argument's text, or None if it has none of the types `kinds`.

    A text that no other type fits is a string where strings are allowed. Without `kinds` only objects and lists are
    JSON, and other text is a string. Python's notation of values is accepted too.
    """
    if kinds == {"string"}:
        return _dumps(text)
    for value in _readings(text):
        kind = _kind_of(value)
        if kind == "string":
            continue  # quotes around a string belong to it
        if kind == "number" and "number" not in kinds and float(value).is_integer():
            value, kind = int(value), "integer"
        fits = kind in kinds or (kind == "integer" and "number" in kinds)
        if fits or (not kinds and kind in ("object", "array")):
            return _dumps(value)
    return _dumps(text) if not kinds or "string" in kinds else None


def _readings(text: str) -> Iterator[Any]:
    """Yield the values that `text` may mean, as JSON and as Python."""
    with suppress(ValueError, RecursionError):
        yield json.loads(text, strict=False, parse_constant=lambda name: name)
    lower = text.strip().lower()
    if lower in ("true", "false", "null", "none"):
        yield {"true": True, "false": False}.get(lower)
        return
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        yield ast.literal_eval(text)


def _dumps(value: Any) -> str | None:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):  # Python's notation also has sets and bytes
        return None


FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class XmlCallParser(CallParser):
    """The parser of the XML form.

    Values of the type string stream while they arrive. Other values are converted to their types when they are
    complete. Inside a value only `</parameter>` has a meaning, so a value may contain the other markers.
    """

    def __init__(self, tools: Sequence[Json], end: str) -> None:
        super().__init__(end)
        self._types = ArgumentTypes(tools)
        self._read = self._read_head
        self._function = ""
        self._parameter = ""
        self._arguments = 0  # of the current call
        self._opened = False  # the opening quote of the current string is sent
        self._calls = 0

    def finish(self) -> list[CallPart]:
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
        if not self._types.declares(name):
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

    def _break(self) -> list[CallPart]:
        was_open = self._open
        super()._break()
        return [CallEnd(complete=False)] if was_open else []


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonCallParser(CallParser):
    """The parser of the JSON form. It returns a call when its end marker has arrived, or at the end of the text."""

    def __init__(self, tools: Sequence[Json], end: str) -> None:
        super().__init__(end)
        self._types = ArgumentTypes(tools)
        self._read = self._read_call
        self._searched = 0  # characters in which no end marker closes the call

    def finish(self) -> list[CallPart]:
        if self.done or self.broken:
            return []
        return self._call_of(self._buffer) or self._break()

    def _read_call(self) -> list[CallPart] | None:
        at = self._buffer.find(self._end, self._searched)
        if at < 0 or not self._end:
            self._searched = max(self._searched, len(self._buffer) - len(self._end))
            return None
        parts = self._call_of(self._buffer[:at])
        if parts is None:  # the marker is inside a string
            self._searched = at + 1
            return []
        if not parts:
            return self._break()
        self._take_end(at)
        return parts

    def _call_of(self, text: str) -> list[CallPart] | None:
        """Return the parts of `_json_call`, or an empty list for a function that the client did not declare."""
        parts = _json_call(text)
        if parts and isinstance(parts[0], CallStart) and not self._types.declares(parts[0].name):
            return []
        return parts


def _json_call(text: str) -> list[CallPart] | None:
    """Return the parts of a call, an empty list for text that is no call, or None for text that ends in a string."""
    try:
        call = json.loads(text, strict=False)
    except RecursionError:
        return []
    except ValueError as error:
        return None if str(error).startswith("Unterminated string") else []
    name = call.get("name") if isinstance(call, dict) else None
    if not name or not isinstance(name, str):
        return []
    arguments = call.get("arguments") or {}
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(arguments, dict) and (content := _dumps(arguments)):
            return [CallStart(name), CallArguments(content), CallEnd(complete=True)]
    return []
