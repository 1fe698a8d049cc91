"""The incremental parser of reasoning and tool calls in an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_lm.generate import TextStateMachine

from coordinator.text import calls
from coordinator.text.calls import CallArguments, CallParser, CallPart, Json
from coordinator.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning, without markers."""

    text: str


Part = Content | Reasoning | CallPart


class ChatParser:
    """The split of one answer's text into parts, while the text streams.

    Line breaks around reasoning and tool calls belong to the template and are dropped. A tool call that cannot be
    parsed becomes content with its markers, after the parts of it that were sent. Without `tools` the parser ignores
    the markup of calls.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool, tools: Sequence[Json] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._mode = "reasoning" if thinking else "normal"
        self._machine = tokenizer.markup(tools=bool(tools))
        self._split = self._machine.make_state(self._mode)
        self._parser: CallParser | None = None
        self._call = ""  # text since the start marker
        self._text = {"reasoning": _Lines(trim=True), "normal": _Lines(trim=False)}

    @property
    def reasoning(self) -> bool:
        """True if the text so far ends inside reasoning."""
        return self._mode == "reasoning"

    def add_text(self, text: str) -> list[Part]:
        """Add `text` and return the parts that became final with it."""
        self._split, segments = TextStateMachine.split(self._split, text)
        return self._read(segments)

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return the parts held back. With `cut` a limit has ended the text, and no incomplete call becomes content."""
        self._split, held, state = TextStateMachine.flush(self._split)
        parts = self._read([(state, held)])
        if self._parser is not None:
            parts += [*self._parser.finish(), *self._end_call(cut=cut)]
        return parts + self._emit("reasoning", "", last=True) + self._emit("normal", "", last=True)

    def _read(self, segments: Iterable[tuple[str, str]]) -> list[Part]:
        parts: list[Part] = []
        for state, text in segments:
            if state != self._mode:
                self._enter(state)
            if state == "tool":
                parts += self._read_call(text)
            else:
                parts += self._emit(state, text)
        return parts

    def _enter(self, state: str) -> None:
        """Change to `state`. Line breaks between two states belong to neither."""
        left, self._mode = self._mode, state
        if state == "tool":
            xml, (_, end) = self._tokenizer.call_form == "xml", self._tokenizer.tool_markers
            parser = calls.XmlCallParser if xml else calls.JsonCallParser
            self._call, self._parser = "", parser(self._tools, end)
        if "reasoning" in (left, state):
            self._text[left].drop()
            self._text["normal" if left == "reasoning" else "reasoning"].trim = True

    def _emit(self, state: str, text: str, *, last: bool = False) -> list[Part]:
        final = self._text[state].add_text(text, last=last)
        if not final:
            return []
        return [Reasoning(final) if state == "reasoning" else Content(final)]

    def _read_call(self, text: str) -> list[Part]:
        """Add text of a call. The text after its end marker is content again."""
        assert self._parser is not None
        self._call += text
        parts: list[Part] = list(self._parser.add_text(text))
        if not self._parser.done:
            return parts
        rest = self._parser.rest
        self._call = self._call[: len(self._call) - len(rest)]
        self._mode, self._split = "normal", self._machine.make_state("normal")
        return [*parts, *self._end_call(), *self.add_text(rest)]

    def _end_call(self, *, cut: bool = False) -> list[Part]:
        """Return the text of the call as content if it cannot be parsed."""
        assert self._parser is not None
        broken, self._parser = self._parser.broken, None
        if broken and not cut:
            return self._emit("normal", self._tokenizer.tool_markers[0] + self._call)
        for lines in self._text.values():
            lines.drop()
            lines.trim = True
        return []


def join_parts(parts: Iterable[Part]) -> list[Part]:
    """Return the parts with adjacent parts of the same type joined."""
    joined: list[Part] = []
    for part in parts:
        match (joined[-1] if joined else None, part):
            case (Content(before), Content(text)):
                joined[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                joined[-1] = Reasoning(before + text)
            case (CallArguments(before), CallArguments(text)):
                joined[-1] = CallArguments(before + text)
            case _:
                joined.append(part)
    return joined


class _Lines:
    """A buffer for line breaks at the end of a text. With `trim`, those before the next text are dropped too."""

    def __init__(self, *, trim: bool) -> None:
        self.trim = trim
        self._held = ""

    def add_text(self, text: str, *, last: bool = False) -> str:
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
