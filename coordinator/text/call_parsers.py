"""Parsers of tool calls that are read when they are whole: mlx-lm's own, and those of forms that mlx-lm has not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlx_lm.tool_parsers.json_tools import parse_tool_call as parse_json

from coordinator.text.schemas import Json, dumps

Calls = list[tuple[str, str]]
"""Names of tools, each with the JSON text of an object."""

Parse = Callable[[str, Sequence[Json]], Calls]
"""The function that reads the text between the marks of a call, for these tools; empty for text that is no call."""


@dataclass(frozen=True)
class CallSyntax:
    """The marks around the calls of a model, and the parser of the text between them. `end` may be empty."""

    start: str
    end: str
    parse: Parse


def json_calls(text: str) -> tuple[Calls, int]:
    """Return names and arguments of the calls at the beginning of `text`, and the length of what was read.

    Without a call the length is 0, or that of `text` if it ends inside a string.
    """
    found: Calls = []
    place, decoder = 0, json.JSONDecoder(strict=False)
    while text[place:].lstrip().startswith("{"):
        start = len(text) - len(text[place:].lstrip())
        try:
            value, place = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            inside = str(error).startswith("Unterminated string")
            return found, place if found else len(text) * inside
        if (call := call_of(value)) is None:
            break
        found.append(call)
    return found, place if found else 0


def call_of(call: Any) -> tuple[str, str] | None:
    """Return name and arguments of a call, or None for another value."""
    inner = call.get("function") if isinstance(call, dict) else None
    call = inner if isinstance(inner, dict) else call
    name = call.get("name") if isinstance(call, dict) else None
    if name and isinstance(name, str):
        arguments = call.get("arguments") or call.get("parameters") or {}
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if isinstance(arguments, dict) and (content := dumps(arguments)):
                return name, content
    return None


def _calls_of(found: Any) -> Calls:
    """Return the calls of a value of JSON, or nothing if one of them is none."""
    calls = [call_of(each) for each in (found if isinstance(found, list) else [found])]
    return [] if None in calls else [call for call in calls if call is not None]


_CALL_ID = re.compile(r"\[CALL_ID\]\w*\[ARGS\]")
"""Mistral's id between a name and its arguments, which mlx-lm's parser takes for the name."""


def published(parse: Callable[[str, Any], Any]) -> Parse:
    """Return mlx-lm's `parse`, whose errors mean that the text is no call."""

    def read(text: str, tools: Sequence[Json]) -> Calls:
        try:
            return _calls_of(parse(_CALL_ID.sub("[ARGS]", text), [*tools]))
        except Exception:  # the parsers raise what they meet, such as AttributeError
            return []

    return read


_BARE = '{"name":'


def _bare(text: str, _tools: Sequence[Json]) -> Calls:
    """Read Llama's JSON, whose beginning is its mark."""
    calls, length = json_calls(_BARE + text)
    return calls if not (_BARE + text)[length:].strip(" \n;") else []


_DSML = "\uff5cDSML\uff5c"
_INVOKE = re.compile(rf'<{_DSML}invoke name="([^"]*)">(.*?)</{_DSML}invoke>', re.DOTALL)
_ARGUMENT = re.compile(rf'<{_DSML}parameter name="([^"]*)" string="(true|false)">(.*?)</{_DSML}parameter>', re.DOTALL)


def _dsml(text: str, _tools: Sequence[Json]) -> list[Json]:
    """Return the calls in the markup of DeepSeek V3.2, which says of each argument whether it is a string."""
    calls = []
    for name, body in _INVOKE.findall(text):
        given = {key: value if text == "true" else json.loads(value) for key, text, value in _ARGUMENT.findall(body)}
        calls.append({"name": name, "arguments": given})
    return calls


_OTHERS = {
    "<TOOLCALL>": CallSyntax("<TOOLCALL>", "</TOOLCALL>", published(parse_json)),
    _DSML: CallSyntax(f"<{_DSML}function_calls>", f"</{_DSML}function_calls>", published(_dsml)),
    'Respond in the format {"name": function name': CallSyntax(_BARE, "", _bare),
}
"""Forms that mlx-lm has no parser for, by a text of the chat template."""


def syntax_in(template: str) -> CallSyntax | None:
    """Return the form of calls that `template` shows and mlx-lm has no parser for."""
    return next((syntax for text, syntax in _OTHERS.items() if text in template), None)


INNER_MARKS = (
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "[ARGS]", "[CALL_ID]", "<escape>"),
    *('<|"|>', _DSML),
)
"""Marks inside calls. They are text for the parsers, though most are control tokens."""
