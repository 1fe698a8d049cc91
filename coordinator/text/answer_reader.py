"""The reader of an answer's structure: reasoning, content and tool calls, while the text streams.

A call of Qwen3.5 is `<function=NAME>` with a `<parameter=NAME>` for each argument, one of Hermes is
`{"name": …, "arguments": {…}}`, and a pair form is its name with a pair of `<arg_key>` and `<arg_value>` for each
argument, all between the marks of a call. Models leave marks out and quote them, so a mark counts only where structure
follows it. What is read depends on the text alone, not on the pieces it arrives in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

from coordinator.text.call_parsers import Parse, json_calls
from coordinator.text.schemas import Json, ToolSchemas, json_of


@dataclass(frozen=True)
class Marks:
    """The marks of a model's reasoning and calls. An empty one does not exist."""

    think: str = ""
    think_end: str = ""
    call: str = ""
    call_end: str = ""
    pairs: bool = False
    """True if a call is a name and pairs."""
    parse: Parse | None = None
    """The parser of the whole text between the marks of a call, in any other form."""
    channels: bool = False
    """True if the answer is written in channels, which `ChannelReader` reads."""


@dataclass(frozen=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning, without marks."""

    text: str


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
    """The end of a tool call. `complete` is False for a call that was cut off."""

    complete: bool


Part = Content | Reasoning | CallStart | CallArguments | CallEnd

Steps = Generator[None, None, None]
"""A part of the reader. It stops where the text so far does not suffice, and is resumed with more or at the end."""

NAME = r"""(?:=|\s+name\s*=)\s*["']?([^<>"'\n]{1,200})["']?[ \t]*(?:>|\n)"""
FUNCTION, PARAMETER = re.compile("<function" + NAME), re.compile("<parameter" + NAME)
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"
OPENINGS = ("<function=", "<function name=")
STRUCTURE = ("<parameter=", "<parameter name=", FUNCTION_END)
TAG = re.compile(r"</parameter>|</function>|<parameter(?=[=\s])|<function(?=[=\s])")
VALUE_TAGS = (PARAMETER_END, FUNCTION_END, "<parameter=", "<function=")

PAIR_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
PAIRS_BEGIN = re.compile(r"\s*[^\s<>]{0,200}\s*(?:<|\Z)")
PAIRS_NAME = re.compile(r"\s*([^\s<>]{1,200})\s*(?=<arg_key>|\Z)")
PAIR = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL)

SPACE, LINE_BREAK = re.compile(r"\s*"), re.compile(r"(\r?\n)?")

MOST_BROKEN = 8
"""Calls without an end behind which a part is still searched for one. Each search takes as long again."""

LONGEST_TAG = 240
"""Characters of the longest opening tag."""


def held_back(text: str, stops: Iterable[str]) -> int:
    """Return the length of the longest suffix of `text` that is the beginning of one of `stops`, but not all of it."""
    stops = [stop for stop in stops if stop]
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(stop) > length and text.endswith(stop[:length]) for stop in stops):
            return length
    return 0


class _NoCallError(Exception):
    """The text is no call; `unfinished` if it ends before the call does."""

    def __init__(self, *, unfinished: bool = False) -> None:
        super().__init__()
        self.unfinished = unfinished


class AnswerReader:
    """The split of one answer's text into parts.

    With `thinking` the text begins inside reasoning, which the template has opened. `reasons` is False where reasoning
    is off: its marks are then text. Reasoning opens at the start or after a call, and nowhere else. Line breaks around
    reasoning and calls belong to the template and are dropped.

    A call is one of `tools` whose structure is whole; other text with marks stays in its part. Strings of a call in
    the content stream while they arrive; a call in reasoning is read when it is whole. One that the text's end breaks
    becomes content, after the parts of it that were sent.
    """

    def __init__(
        self,
        marks: Marks,
        *,
        thinking: bool = False,
        reasons: bool = True,
        tools: Sequence[Json] = (),
    ) -> None:
        self._marks = marks
        self._tools = ToolSchemas(tools) if tools else None
        self._reasons = (reasons or thinking) and bool(marks.think)
        self._part: type[Content] | type[Reasoning] = Reasoning if thinking else Content
        self._buffer = ""
        self._last = self._cut = False
        self._parts: list[Part] = []
        self._taken: list[str] | None = None  # the text of the call so far
        self._waiting: list[Part] = []  # parts of a call in reasoning
        self._begun = False  # a part of the call is sent
        self._muted = False
        self._line_begun = False  # the part of a value that is sent ends in a line with text
        self._behind = ""  # text behind the reasoning, hidden from a call in it
        self._broken = 0  # calls of this part that do not end in it
        self._fresh = True  # reasoning may open here
        self._quoted = 0  # marks of reasoning that are open in the content
        self._unended = False  # a call's end mark may still come
        self._lines = {Reasoning: _Lines(trim=True), Content: _Lines(trim=False)}
        self._line = _Line()
        self._machine = self._read_answer()

    @property
    def reasoning(self) -> bool:
        """True if the text so far ends inside reasoning."""
        return self._part is Reasoning

    def add_text(self, text: str) -> list[Part]:
        """Add `text` and return the parts that became final with it."""
        self._buffer += text
        if self._taken is not None:
            self._hide_content()
        return self._advance()

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return the parts held back. With `cut` a limit has ended the text, and no incomplete call becomes content."""
        self._last, self._cut = True, cut
        return self._advance()

    def _advance(self) -> list[Part]:
        next(self._machine, None)
        parts, self._parts = self._parts, []
        return parts

    # ---- text between calls

    def _read_answer(self) -> Steps:
        while True:
            marks = self._open_marks()
            found = min(((at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0), default=None)
            if found is None:
                held = 0 if self._last else held_back(self._buffer, marks)
                self._emit(self._take(len(self._buffer) - held))
                if self._last:
                    break
                yield
                continue
            at, mark = found
            self._emit(self._take(at))
            if mark == self._marks.call_end:
                self._take(len(mark))
                self._unended = False
            elif mark in (self._marks.think, self._marks.think_end):
                yield from self._read_mark(mark)
            else:
                yield from self._read_calls(mark)
        for part in (Reasoning, Content):
            if final := self._lines[part].add_text("", last=True):
                self._parts.append(part(final))

    def _open_marks(self) -> list[str]:
        marks = self._marks
        found = [marks.think, marks.think_end]
        bare = () if marks.parse else OPENINGS
        found += [marks.call, *bare] if self._tools and self._broken < MOST_BROKEN else []
        found += [marks.call_end] if self._unended else []
        return [mark for mark in found if mark]

    def _read_mark(self, mark: str) -> Steps:
        """Read a mark of reasoning. In the content it is dropped, or text that quotes it."""
        if self.reasoning and mark == self._marks.think:
            text = self._take(len(mark))
            self._emit("" if self._fresh else text)  # the template has opened it
        elif self.reasoning:
            self._take(len(mark))
            self._enter(Content)
        elif mark == self._marks.think:
            if self._fresh and self._reasons:
                self._take(len(mark))
                self._enter(Reasoning)
            else:
                self._quoted += 1
                self._emit(self._take(len(mark)))
        elif self._quoted:
            self._quoted -= 1
            self._emit(self._take(len(mark)))
        else:
            while not self._last and len(self._buffer) == len(mark):
                yield
            after = self._buffer[len(mark) : len(mark) + 1]
            stray = self._reasons or self._fresh or (self._line.blank and after in ("", "\n"))
            text = self._take(len(mark))
            if not stray:
                self._emit(text)
            elif self._fresh:
                self._lines[Content].trim = True

    def _enter(self, part: type[Content] | type[Reasoning]) -> None:
        """Change to reasoning or content. Line breaks between the two belong to neither."""
        self._lines[self._part].drop()
        self._part, self._fresh, self._broken = part, False, 0
        self._lines[part].trim = True
        self._line = _Line()

    def _emit(self, text: str) -> None:
        if not text:
            return
        if text.strip():
            self._fresh = False
        self._line.add(text)
        if final := self._lines[self._part].add_text(text):
            self._parts.append(self._part(final))

    def _take(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._taken is not None:
            self._taken.append(text)
        return text

    # ---- calls

    def _read_calls(self, opening: str) -> Steps:
        """Read the calls behind an opening mark, or leave the mark as text."""
        bare = opening != self._marks.call
        is_json = opening.startswith("{")  # without a mark, a call is all that the answer has
        if (bare and not self._line.blank) or (is_json and not self._fresh):
            self._emit(self._take(len(opening)))
            return
        self._taken, self._waiting, self._begun, self._muted = [], [], False, False
        self._hide_content()
        if not bare:
            self._take(len(opening))
        try:
            yield from self._read_call()
            while (yield from self._another()):
                yield from self._read_call()
        except _NoCallError as error:
            self._leave_call(opening, unfinished=error.unfinished)
        self._taken = None
        self._buffer, self._behind = self._buffer + self._behind, ""

    def _hide_content(self) -> None:
        """Hide the text behind the end of the reasoning from a call in it, which the text must not change."""
        end = self._marks.think_end
        if self.reasoning and (self._behind or end in self._buffer):
            before, end, behind = self._buffer.partition(end)
            self._buffer, self._behind = before + end, self._behind + behind

    def _read_call(self) -> Steps:
        """Read one call, in either form."""
        while True:
            while self._follows(0, (self._marks.call,), at_end=False) is None:
                yield from self._more()
            self._take(len(self._buffer) - len(self._buffer.lstrip()))
            if not self._marks.call or not self._buffer.startswith(self._marks.call):
                break
            self._take(len(self._marks.call))  # written twice
        if self._marks.parse is not None:
            yield from self._read_whole(self._parsed_calls)
        elif self._buffer.startswith("{"):
            yield from self._read_whole(json_calls)
        else:
            yield from self._read_whole(self._pair_calls) if self._marks.pairs else self._read_function()
        if self.reasoning and self._marks.think_end in "".join(self._taken or ()):
            raise _NoCallError  # the reasoning has ended before the call
        if self._line.fence and (yield from self._fence_closes()):
            raise _NoCallError
        self._parts += self._waiting
        self._taken, self._waiting, self._begun = [], [], False
        for lines in self._lines.values():
            lines.drop()
            lines.trim = True
        self._fresh, self._line = True, _Line()

    def _fence_closes(self) -> Generator[None, None, bool]:
        """Return whether the block of code ends behind the call, which is then an example."""
        end, fence = self._marks.call_end, self._line.fence
        while (found := self._follows(0, (end, fence), at_end=False)) is None:
            yield
        place = self._behind_blanks(0)
        if not found or self._buffer.startswith(fence, place):
            return found
        while (found := self._follows(place + len(end), (fence,), at_end=False)) is None:
            yield
        return found

    def _another(self) -> Generator[None, None, bool]:
        """Read the end mark of calls. Returns True if another call follows without one."""
        tags = (self._marks.call_end, *(() if self._marks.parse else OPENINGS))
        while (found := self._follows(0, tags, at_end=False)) is None:
            yield
        self._unended = True  # it may follow other text
        if not found:
            return False
        self._take(len(self._buffer) - len(self._buffer.lstrip()))
        if self._marks.call_end and self._buffer.startswith(self._marks.call_end):
            self._take(len(self._marks.call_end))
            return False
        return True

    def _leave_call(self, opening: str, *, unfinished: bool) -> None:
        """Make the text of a broken call text of its part, or nothing where a limit has cut it off."""
        text, self._taken = "".join(self._taken or ()), None
        wrapped = opening == self._marks.call and not self.reasoning
        if self._begun:
            self._parts.append(CallEnd(complete=False))
        if self._cut and unfinished and (self._begun or wrapped):
            self._buffer = ""
            return
        self._buffer, self._broken = text + self._buffer, self._broken + unfinished
        self._emit(self._take(len(self._buffer if self._begun else opening)))

    def _send(self, *parts: Part) -> None:
        """Send parts of a call: at once in the content, and when it is whole in reasoning or a block of code."""
        if self._muted:
            return
        if self.reasoning or self._line.fence:
            self._waiting += parts
        else:
            self._parts += parts
            self._begun = True

    def _more(self) -> Steps:
        """Wait for more text of a call. Raises _NoCallError if there is none, or if the reasoning ends before."""
        if self._last or self._reasoning_ends:
            raise _NoCallError(unfinished=True)
        yield

    @property
    def _reasoning_ends(self) -> bool:
        return self.reasoning and self._marks.think_end in self._buffer

    def _behind_blanks(self, at: int) -> int:
        found = SPACE.match(self._buffer, at)
        return found.end() if found else at

    def _follows(self, at: int, tags: Iterable[str], *, at_end: bool = True) -> bool | None:
        """Return whether one of `tags` follows behind blanks, None if that is open, and `at_end` at the text's end."""
        at = self._behind_blanks(at)
        rest = self._buffer[at : at + LONGEST_TAG]
        tags = [tag for tag in tags if tag]
        if rest and any(rest.startswith(tag) for tag in tags):
            return True
        if self._last:
            return at_end and not rest
        return None if any(tag.startswith(rest) for tag in tags) else False

    def _name(self, pattern: re.Pattern[str], tag: str) -> Generator[None, None, str]:
        """Read the name of an opening tag."""
        while (found := pattern.match(self._buffer)) is None:
            text = self._buffer[:LONGEST_TAG]
            begun = text.startswith(tag) or tag.startswith(text)
            if not begun or len(text) == LONGEST_TAG or ">" in text or "\n" in text:
                raise _NoCallError
            yield from self._more()
        self._take(found.end())
        return found[1].strip()

    # ---- the forms that are read when they are whole

    def _parsed_calls(self, text: str) -> tuple[list[tuple[str, str]], int]:
        """See `json_calls`."""
        assert self._marks.parse is not None and self._tools is not None
        found = self._marks.parse(text, self._tools.tools)
        return found, len(text) if found else 0

    def _pair_calls(self, text: str) -> tuple[list[tuple[str, str]], int]:
        """See `json_calls`."""
        name = PAIRS_NAME.match(text)
        if name is None or self._tools is None or not self._tools.declares(name[1]):
            return [], 0
        place, given = name.end(), dict[str, str]()
        while (pair := PAIR.match(text, place)) is not None:
            kinds = self._tools.kinds(name[1], key := pair[1].strip())
            given.setdefault(key, json_of(pair[2], kinds))
            place = pair.end()
        if rest := text[place:].strip():
            return [], len(text) if rest.startswith("<arg_key>") else 0
        inner = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in given.items())
        return [(name[1], f"{{{inner}}}")], len(text)

    def _read_whole(self, parse: Callable[[str], tuple[list[tuple[str, str]], int]]) -> Steps:
        """Read the calls that `parse` finds up to their end mark, or to the end of the text."""
        marks, searched = self._marks, 0
        both = (marks.call_end, marks.think_end if self.reasoning else "")
        ends = [mark for mark in both if mark]
        while True:
            places = [at for end in ends if (at := self._buffer.find(end, searched)) >= 0]
            at = min(places, default=-1)
            if marks.pairs and not PAIRS_BEGIN.match(self._buffer):
                raise _NoCallError
            if at < 0 and not self._last:
                searched = max(searched, len(self._buffer) - max(map(len, ends), default=0))
                yield from self._more()
                continue
            text = self._buffer[:at] if at >= 0 else self._buffer
            ended = at >= 0 and self._buffer.startswith(marks.call_end, at)
            if marks.pairs and not ended and (self._cut or "</arg_value>" not in text):
                # Neither a name nor a pair says that the call ends, as a closed object does.
                raise _NoCallError(unfinished=True)
            if marks.parse and marks.call_end and not ended and self._cut:
                raise _NoCallError(unfinished=True)  # parsers may leave out what is not whole
            found, length = parse(text)
            if found or at < 0:
                break
            if not length:
                raise _NoCallError
            searched = at + 1  # the mark is inside a string
        if not found:
            raise _NoCallError(unfinished=True)
        if self._tools is None or not all(self._tools.declares(name) for name, _ in found):
            raise _NoCallError
        further = any(mark in self._buffer[length:at] for mark in (marks.call or "{", *OPENINGS))
        self._take(length if at < 0 or further else at)
        for name, arguments in found:
            self._send(CallStart(name), CallArguments(arguments), CallEnd(complete=True))

    # ---- the XML form

    def _read_function(self) -> Steps:
        function = yield from self._name(FUNCTION, "<function")
        if self._tools is None or not self._tools.declares(function):
            raise _NoCallError
        begin = (*STRUCTURE, self._marks.call_end)
        while (found := self._follows(0, begin, at_end=False)) is None:
            yield from self._more()
        rest = self._buffer.lstrip()
        if not found and not (self._cut and any(tag.startswith(rest) for tag in begin)):
            raise _NoCallError
        self._send(CallStart(function), CallArguments("{"))
        given: list[str] = []
        while True:
            marks = (self._marks.call_end, self._marks.call)
            tags = [tag for tag in (*STRUCTURE, *OPENINGS, *marks) if tag]
            while not (places := [at for tag in tags if (at := self._buffer.find(tag)) >= 0]):
                yield from self._more()
            self._take(min(places))  # other text has no meaning
            if not self._buffer.startswith("<parameter"):
                break
            try:
                name = yield from self._name(PARAMETER, "<parameter")
            except _NoCallError as error:
                if error.unfinished:
                    raise
                self._take(1)
                continue
            comma = ", " if given else ""
            self._muted = name in given  # a second value would make the object invalid
            given.append(name)
            self._send(CallArguments(f"{comma}{json.dumps(name, ensure_ascii=False)}: "))
            yield from self._read_value(function, given)
            self._muted = False
        if self._buffer.startswith(FUNCTION_END):
            self._take(len(FUNCTION_END))
        self._send(CallArguments("}"), CallEnd(complete=True))

    def _read_value(self, function: str, given: Sequence[str]) -> Steps:
        """Read the value of the last parameter `given`, with its end. Strings are sent while they arrive."""
        assert self._tools is not None
        kinds = self._tools.kinds(function, given[-1])
        streams = "string" in kinds and kinds <= {"string", "null"} and not self.reasoning
        while self._buffer in ("", "\r"):
            yield from self._more()
        self._take(found.end() if (found := LINE_BREAK.match(self._buffer)) else 0)
        opened, looked, end = False, 0, -1
        self._line_begun = False
        while end < 0:
            tag = TAG.search(self._buffer, looked)
            nested = tag is not None and tag[0] not in (PARAMETER_END, FUNCTION_END)
            ends = None if tag is None or nested else self._ends(tag)
            if tag is None:
                sure = looked = len(self._buffer) - held_back(self._buffer, VALUE_TAGS)
            elif ends:
                end = tag.start()
                break
            elif ends is False:
                looked = tag.end()
                continue
            else:
                sure = looked = tag.start()
            # A line break may belong to the end.
            sure = len(self._buffer[:sure].removesuffix("\n").removesuffix("\r"))
            if streams and sure and (opened or not _may_be_null(self._buffer[:sure], kinds)):
                text = self._take(sure)
                self._send(CallArguments(_escaped(text) if opened else f'"{_escaped(text)}'))
                opened, looked = True, looked - sure
                line = text.rpartition("\n")
                self._line_begun = bool(line[2].strip()) or (self._line_begun and not line[1])
            if nested:
                end = yield from self._nested_end(function, given)
            else:
                yield from self._more()
        value = self._take(end)
        value = value.removesuffix("\r\n" if value.endswith("\r\n") else "\n")
        if self._buffer.startswith(PARAMETER_END):
            self._take(len(PARAMETER_END))
        self._send(CallArguments(f'{_escaped(value)}"' if opened else json_of(value, kinds)))

    def _ends(self, tag: re.Match[str]) -> bool | None:
        """Return whether a closing tag ends a value, because structure follows it, or None if that is open."""
        ends = (self._marks.call_end, self._marks.call, *OPENINGS)
        if tag[0] == FUNCTION_END:
            return self._follows(tag.end(), ends)
        if (found := self._follows(tag.end(), (*STRUCTURE, *ends))) is not False:
            return found
        # Some models close the function with a second mark of a parameter.
        place = self._behind_blanks(tag.end())
        if not self._buffer.startswith(PARAMETER_END, place):
            return None if self._follows(tag.end(), (PARAMETER_END,)) is None else False
        return self._follows(place + len(PARAMETER_END), (self._marks.call_end,), at_end=False)

    def _nested_end(self, function: str, given: Sequence[str]) -> Generator[None, None, int]:
        """Return the end of a value that has opening tags, once the call that it belongs to is whole.

        Tags are counted in pairs. Where they make no pairs, the first end with structure behind it counts, or a
        parameter that the schema declares and that opens a line: the tag before it was left out.
        """
        depth, functions, looked, end = 1, 1, 0, -1
        while True:
            while (tag := TAG.search(self._buffer, looked)) is not None:
                if tag[0] == FUNCTION_END and functions == 1:
                    ends = self._ends(tag)
                    if ends is None:
                        break
                    if ends and depth == 0:
                        return end
                elif tag[0] == FUNCTION_END:
                    functions -= 1
                elif tag[0] == PARAMETER_END:
                    depth -= 1
                    end = tag.start() if depth == 0 and end < 0 else end
                elif tag[0] == "<parameter":
                    depth += 1
                else:
                    functions += 1
                looked = tag.end()
            if self._last or self._reasoning_ends:
                break
            looked = max(looked, len(self._buffer) - LONGEST_TAG) if tag is None else looked
            yield from self._more()
        assert self._tools is not None
        declared = self._tools.properties(function).keys() - {*given}
        for tag in TAG.finditer(self._buffer):
            name = PARAMETER.match(self._buffer, tag.start())
            opens = name and name[1].strip() in declared and self._opens_line(tag.start())
            if opens or (tag[0].startswith("</") and self._ends(tag)):
                return tag.start()
        raise _NoCallError(unfinished=True)

    def _opens_line(self, at: int) -> bool:
        start = self._buffer.rfind("\n", 0, at)
        begun = start < 0 and self._line_begun
        return not begun and not self._buffer[start + 1 : at].strip()


def _may_be_null(text: str, kinds: Iterable[str]) -> bool:
    return "null" in kinds and any(w.startswith(text.strip().lower()) for w in ("null", "none"))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


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


class _Line:
    """The line that a text ends in."""

    def __init__(self) -> None:
        self.fence = ""
        """The mark that opened the block of code around the line, or an empty string."""
        self._begin = ""  # the line from its first character that is not blank, as far as it matters

    @property
    def blank(self) -> bool:
        """True if nothing stands in the line."""
        return not self._begin

    def add(self, text: str) -> None:
        """Add the next text."""
        first, *others = text.split("\n")
        for number, part in enumerate((first, *others)):
            if number:
                self._end()
            if len(self._begin) < LONGEST_TAG:
                self._begin = (self._begin + part).lstrip()[:LONGEST_TAG]

    def _end(self) -> None:
        mark = self._begin[:3]
        if self.fence:
            self.fence = "" if mark == self.fence else self.fence
        elif mark == "~~~" or (mark == "```" and "`" not in self._begin[3:]):
            self.fence = mark
        self._begin = ""
