"""The reader of answers in channels, as gpt-oss writes them (OpenAI's harmony format).

An answer is a row of messages. Each has a header, `<|channel|>NAME` with perhaps `to=RECIPIENT`, then `<|message|>`,
its text and an end mark. The channel `analysis` is reasoning, and a message to `functions.NAME` is a call whose text
is the JSON of its arguments. Other messages are content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from coordinator.text.answer_reader import (
    AnswerReader,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Marks,
    Part,
    Reasoning,
    held_back,
)
from coordinator.text.call_parsers import call_of
from coordinator.text.schemas import Json, ToolSchemas

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
ENDS = (*MESSAGE_ENDS, START, CHANNEL)
HEADER = (START, CHANNEL, MESSAGE, "to=")
"""Texts that a header begins with. The prompt ends with the first header's `<|start|>assistant`."""

LONGEST_HEADER = 400
"""Characters. A longer text without MESSAGE is no header."""


class ChannelReader:
    """The split of one answer's text into parts, as `AnswerReader` does it."""

    def __init__(self, tools: Sequence[Json] = ()) -> None:
        self._tools = ToolSchemas(tools) if tools else None
        self._buffer = ""
        self._part: type[Content] | type[Reasoning] | None = None  # of the message; None in a header
        self._call: str | None = None  # the name of the tool that the message calls
        self._arguments = ""
        self._said: set[type[Part]] = set()  # parts that earlier messages have
        self._fresh = True  # the message has no text yet

    @property
    def reasoning(self) -> bool:
        """True if the text so far ends inside reasoning."""
        return self._part is Reasoning

    def add_text(self, text: str) -> list[Part]:
        """Add `text` and return the parts that became final with it."""
        self._buffer += text
        return self._read(last=False)

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return the parts held back. With `cut` a limit has ended the text."""
        parts = self._read(last=True)
        return parts + self._end_message(cut=cut)

    def _read(self, *, last: bool) -> list[Part]:
        parts: list[Part] = []
        while self._buffer:
            if self._part is None and not self._read_header(last=last):
                break
            found = min(((at, end) for end in ENDS if (at := self._buffer.find(end)) >= 0), default=None)
            held = 0 if last else held_back(self._buffer, ENDS)
            at = found[0] if found else len(self._buffer) - held
            text, self._buffer = self._buffer[:at], self._buffer[at:]
            parts += self._add(text)
            if found is None:
                break
            if found[1] in MESSAGE_ENDS:
                self._buffer = self._buffer.removeprefix(found[1])
            parts += self._end_message()
        return parts

    def _read_header(self, *, last: bool) -> bool:
        """Read the header of a message. Return False if more text is needed for it."""
        at = self._buffer.find(MESSAGE)
        begin = self._buffer.lstrip()
        is_header = any(mark.startswith(begin) or begin.startswith(mark) for mark in HEADER)
        if not is_header or (at < 0 and len(self._buffer) > LONGEST_HEADER):
            self._part, self._fresh = Content, True  # such as the rest of a message that the prompt begins
            return True
        if at < 0:
            self._buffer = "" if last else self._buffer
            return False
        header, self._buffer = self._buffer[:at], self._buffer[at + len(MESSAGE) :]
        channel = re.search(r"<\|channel\|>\s*(\w*)", header)
        recipient = re.search(r"to=(?:functions\.)?([^\s<]+)", header)
        name = recipient[1] if recipient else ""
        self._call = name if self._tools and self._tools.declares(name) else None
        is_reasoning = channel is not None and channel[1] == "analysis" and not self._call
        self._part, self._fresh = Reasoning if is_reasoning else Content, True
        return True

    def _add(self, text: str) -> list[Part]:
        if self._call is not None:
            self._arguments += text
            return []
        if not text or self._part is None:
            return []
        text = f"\n\n{text}" if self._fresh and self._part in self._said else text
        self._said.add(self._part)
        self._fresh = False
        return [self._part(text)]

    def _end_message(self, *, cut: bool = False) -> list[Part]:
        name, arguments = self._call, self._arguments
        self._call, self._arguments = None, ""
        part, self._part = self._part, None
        if name is None or part is None:
            return []
        if cut:
            return [CallStart(name), CallArguments(arguments), CallEnd(complete=False)]
        call = call_of({"name": name, "arguments": arguments})
        return (
            [Content(arguments)] if call is None else [CallStart(name), CallArguments(call[1]), CallEnd(complete=True)]
        )


def reader_of(
    marks: Marks, *, thinking: bool = False, reasons: bool = True, tools: Sequence[Json] = ()
) -> AnswerReader | ChannelReader:
    """Return the reader of an answer with these marks. See `AnswerReader` for the options."""
    if marks.channels:
        return ChannelReader(tools)
    return AnswerReader(marks, thinking=thinking, reasons=reasons, tools=tools)
