"""The incremental parser of reasoning and tool calls in an answer, with mlx-lm's markers and call parsers."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_lm.generate import TextStateMachine

from coordinator.text.model_info import Json
from coordinator.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning, without markers."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model. `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


Part = Content | Reasoning | ToolCall


class ChatParser:
    """The split of one answer's text into parts, while the text streams.

    Line breaks around reasoning and tool calls belong to the template and are dropped. A tool call that cannot be
    parsed becomes content with its markers. Without `tools` the parser ignores the markup of calls.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool, tools: Sequence[Json] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._mode = "reasoning" if thinking else "normal"
        self._split = tokenizer.markup(tools=bool(tools)).make_state(self._mode)
        self._call = ""
        self._text = {"reasoning": _Lines(trim=True), "normal": _Lines(trim=False)}

    @property
    def reasoning(self) -> bool:
        """True if the text so far ends inside reasoning."""
        return self._mode == "reasoning"

    def add(self, text: str) -> list[Part]:
        """Add `text` and return the parts that became final with it."""
        self._split, segments = TextStateMachine.split(self._split, text)
        return self._read(segments)

    def finish(self) -> list[Part]:
        """Return the parts held back, after the last text. A call without its end marker may be complete."""
        self._split, held, state = TextStateMachine.flush(self._split)
        parts = self._read([(state, held)])
        if self._mode == "tool":
            parts += self._end_call("")
        return parts + self._emit("reasoning", "", last=True) + self._emit("normal", "", last=True)

    def _read(self, segments: Iterable[tuple[str, str]]) -> list[Part]:
        parts: list[Part] = []
        for state, text in segments:
            if state != self._mode:
                parts += self._enter(state)
            if state == "tool":
                self._call += text
            else:
                parts += self._emit(state, text)
        return parts

    def _enter(self, state: str) -> list[Part]:
        """Change to `state`. Line breaks between two states belong to neither."""
        left, self._mode = self._mode, state
        if left == "tool":
            _, end = self._tokenizer.tool_markers
            return self._end_call(end)
        if "reasoning" in (left, state):
            self._text[left].drop()
            self._text["normal" if left == "reasoning" else "reasoning"].trim = True
        return []

    def _emit(self, state: str, text: str, *, last: bool = False) -> list[Part]:
        final = self._text[state].add(text, last=last)
        if not final:
            return []
        return [Reasoning(final) if state == "reasoning" else Content(final)]

    def _end_call(self, end: str) -> list[Part]:
        """Return the calls in the text since the start marker, or that text as content if it cannot be parsed."""
        text, self._call = self._call, ""
        try:
            calls = _tool_calls(self._tokenizer.parse_tool_call(text, self._tools))
        except Exception:  # mlx-lm's parsers raise errors of many types
            log.debug("tool call not parsed, sent as text", exc_info=True)
            return self._emit("normal", self._tokenizer.tool_markers[0] + text + end)
        for lines in self._text.values():
            lines.drop()
            lines.trim = True
        return list(calls)


def join_parts(parts: Iterable[Part]) -> list[Part]:
    """Return the parts with adjacent parts of the same type joined."""
    joined: list[Part] = []
    for part in parts:
        match (joined[-1] if joined else None, part):
            case (Content(before), Content(text)):
                joined[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                joined[-1] = Reasoning(before + text)
            case _:
                joined.append(part)
    return joined


class _Lines:
    """A buffer for the line breaks at the end of a text, until more text follows them.

    With `trim`, line breaks before the next text are dropped too.
    """

    def __init__(self, *, trim: bool) -> None:
        self.trim = trim
        self._held = ""

    def add(self, text: str, *, last: bool = False) -> str:
        """Add `text` and return the text that is final; with `last` nothing is held back."""
        if self.trim:
            text = text.lstrip("\n")
            self.trim = not text
        text = self._held + text
        final = text if last else text.rstrip("\n")
        self._held = text[len(final) :]
        return final

    def drop(self) -> None:
        """Drop the line breaks held back."""
        self._held = ""


def _tool_calls(parsed: object) -> list[ToolCall]:
    """Convert the result of a parser. Raises ValueError if it is not a call or a list of calls."""
    calls = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("a tool call has a name")
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise ValueError("a tool call's arguments are an object")
        call_id = call.get("id") or f"call_{uuid.uuid4().hex[:24]}"
        calls.append(ToolCall(str(call_id), call["name"], _dumps(arguments)))
    if not calls:
        raise ValueError("no tool call")
    return calls


def _dumps(arguments: Json) -> str:
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
