"""The incremental parser of Hermes' JSON calls: `{"name": …, "arguments": {…}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from coordinator.text.call_parts import CallArguments, CallEnd, CallPart, CallStart

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SPACE = " \t\r\n"

_OUTSIDE_STRINGS = frozenset('{}[]:,"+-.0123456789Etruefalsn' + _SPACE)
"""The characters of JSON outside strings."""


class JsonCallParser:
    """The CallParser of the JSON form.

    The arguments stream while they arrive, as the model writes them. Control characters in their strings, which JSON
    forbids, are escaped. Arguments before the name, or in a string, are sent when the call is complete.
    """

    def __init__(self, end: str) -> None:
        self.done = False
        self.broken = False
        self.rest = ""
        self._end = end
        self._buffer = ""
        self._read: Callable[[], list[CallPart] | None] = self._read_start
        self._key = ""
        self._start: CallStart | None = None
        self._arguments = _JsonObject()
        self._unsent = ""  # arguments
        self._complete = False

    def add(self, text: str) -> list[CallPart]:
        """See CallParser."""
        self._buffer += text
        parts: list[CallPart] = []
        while not self.done and (found := self._read()) is not None:
            parts += found
        return parts

    def finish(self) -> list[CallPart]:
        """See CallParser."""
        return [] if self.done or self.broken or self._complete else self._break()

    def _read_start(self) -> list[CallPart] | None:
        character = self._next_character()
        if character is None:
            return None
        if character != "{":
            return self._break()
        self._buffer = self._buffer[1:]
        self._read = self._read_key
        return []

    def _read_key(self) -> list[CallPart] | None:
        """Read the next key with its colon, or the end of the call."""
        character = self._next_character(",")
        if character == "}":
            self._buffer = self._buffer[1:]
            return self._complete_call()
        if character is None or character != '"':
            return None if character is None else self._break()
        key = _STRING.match(self._buffer)
        after = self._buffer[key.end() :].lstrip(_SPACE) if key else ""
        if key is None or not after:
            return None
        if after[0] != ":":
            return self._break()
        self._key, self._buffer = key[0][1:-1], after[1:]
        self._read = self._read_value
        return []

    def _read_value(self) -> list[CallPart] | None:
        """Read the value of the current key. Keys other than the name and the arguments are ignored."""
        character = self._next_character()
        if character is None:
            return None
        if self._key == "arguments" and character == "{":
            self._read = self._read_arguments
            return []
        try:
            value, length = json.JSONDecoder(strict=False).raw_decode(self._buffer)
        except (ValueError, RecursionError):
            return self._break() if self._end in self._buffer else None
        if length == len(self._buffer):
            return None  # a number may continue
        self._buffer = self._buffer[length:]
        self._read = self._read_key
        if self._key == "name" and isinstance(value, str) and value and self._start is None:
            self._start = CallStart(value)
            return [self._start, *self._send_arguments()]
        if self._key == "arguments" and isinstance(value, str):
            self._unsent += self._arguments.add(value.strip())[0]
        return []

    def _read_arguments(self) -> list[CallPart] | None:
        if not self._buffer:
            return None
        text, used = self._arguments.add(self._buffer)
        self._unsent += text
        self._buffer = self._buffer[used:]
        if self._arguments.ended:
            self._read = self._read_key
        elif self._buffer:
            return [*self._send_arguments(), *self._break()]
        return self._send_arguments()

    def _send_arguments(self) -> list[CallPart]:
        """Return the arguments that are not sent yet, once the name is known."""
        if self._start is None or not self._unsent:
            return []
        text, self._unsent = self._unsent, ""
        return [CallArguments(text)]

    def _complete_call(self) -> list[CallPart]:
        """End the call if its arguments are a JSON object."""
        if not self._arguments.text:
            self._unsent = self._arguments.add("{}")[0]
        if self._start is None or not self._arguments.is_valid():
            return self._break()
        self._complete = True
        self._read = self._read_to_end
        return [*self._send_arguments(), CallEnd(complete=True)]

    def _next_character(self, skipped: str = "") -> str | None:
        """Return the next character after spaces and the characters `skipped`, or None if there is none."""
        self._buffer = self._buffer.lstrip(_SPACE + skipped)
        return self._buffer[:1] or None

    def _break(self) -> list[CallPart]:
        """Give up: the text is not a call. The text up to the end marker belongs to it."""
        self.broken = True
        self._read = self._read_to_end
        return [CallEnd(complete=False)] if self._start is not None else []

    def _read_to_end(self) -> list[CallPart] | None:
        at = self._buffer.find(self._end)
        if at < 0:
            return None
        self.done = True
        self.rest, self._buffer = self._buffer[at + len(self._end) :], ""
        return []


class _JsonObject:
    """The text of a JSON object, up to the brace that closes it."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._depth = 0
        self._string = False
        self._escape = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._parts)

    @property
    def ended(self) -> bool:
        """True after the brace that closes the object."""
        return bool(self._parts) and self._depth == 0

    def add(self, text: str) -> tuple[str, int]:
        """Append `text` up to the end of the object, or to a character that JSON does not allow there.

        Return the appended text, in which control characters of strings are escaped, and the characters used.
        """
        kept: list[str] = []
        for character in text:
            if not self._string and character not in _OUTSIDE_STRINGS:
                break
            kept.append(self._read_character(character))
            if self._depth == 0:
                break
        appended = "".join(kept)
        self._parts.append(appended)
        return appended, len(kept)

    def _read_character(self, character: str) -> str:
        if not self._string:
            self._string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            return character
        if self._escape:
            self._escape = False
        elif character == "\\":
            self._escape = True
        elif character == '"':
            self._string = False
        elif character < " ":
            return json.dumps(character)[1:-1]
        return character

    def is_valid(self) -> bool:
        """Return whether the text is a JSON object."""
        try:
            return isinstance(json.loads(self.text), dict)
        except (ValueError, RecursionError):
            return False
