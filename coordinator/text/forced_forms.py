"""Grammars of forced calls whose arguments are JSON behind a header, and of answers in channels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.text.grammars import ANY_OBJECT, MAX_CALLS, OutputFormat, json_rule, quoted
from coordinator.text.schemas import Json
from proto.errors import RequestError


@dataclass(frozen=True)
class JsonForm:
    """The texts around calls, `start` and `end`, and around a call's arguments, `before` and `after`.

    In `before`, `{}` stands for the name and `#` for a number. `single` is True where an answer has one call.
    """

    before: str
    after: str = ""
    start: str = ""
    end: str = ""
    single: bool = False


_KIMI = JsonForm(
    "<|tool_call_begin|>functions.{}:#<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
)
_MISTRAL = JsonForm("[TOOL_CALLS]{}[ARGS]")
_LIST = JsonForm('{{"name": "{}", "arguments": ', "}", "[TOOL_CALLS][", "]", single=True)
_LLAMA = JsonForm('{{"name": "{}", "parameters": ', "}", single=True)
_NEMOTRON = replace(_LIST, start="<TOOLCALL>[", end="]</TOOLCALL>")
CHANNEL_CALL = JsonForm("commentary to=functions.{} <|constrain|>json<|message|>", single=True)
"""The form of calls in channels, behind the opening of a channel."""


def json_form(parser: str, mark: str, source: str) -> JsonForm | None:
    """Return the form of the calls that mlx-lm's `parser` reads, or that begin with `mark`, if it is known.

    `source` is the chat template.
    """
    if parser == "mistral":
        return _MISTRAL if "[ARGS]" in source else _LIST
    return {"kimi_k2": _KIMI}.get(parser) or {'{"name":': _LLAMA, "<TOOLCALL>": _NEMOTRON}.get(mark)


class Speller:
    """The spelling of texts in a grammar. `controls` are the ids of control tokens, which no text stands for."""

    def __init__(self, controls: Mapping[str, int]) -> None:
        self._controls = controls
        longest = sorted(controls, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest)) or '(?!)'}|#)")

    def spell(self, text: str) -> str:
        """Return the expression of `text`, in which `#` is a number."""
        parts = [part for part in self._pattern.split(text) if part]
        found = [f"<[{self._controls[part]}]>" if part in self._controls else quoted(part) for part in parts]
        return " ".join("/[0-9]{1,3}/" if part == quoted("#") else part for part in found)

    @property
    def opening(self) -> str:
        """The expression of all that stands before the last channel's name: perhaps an analysis."""
        thought = f"{self.spell('analysis<|message|>')} /(?s:.*)/ {self.spell('<|end|><|start|>assistant<|channel|>')}"
        return f"{self.spell('<|channel|>')} ({thought})?"


def json_form_grammar(tools: Sequence[Json], form: JsonForm, controls: Mapping[str, int], *, single: bool) -> str:
    """Return a Lark grammar of one call of `tools`, in OpenAI's format, or of up to MAX_CALLS, in `form`."""
    speller, rules = Speller(controls), []
    for number, tool in enumerate(tools):
        function = tool["function"]
        schema = {"type": "object", **(function.get("parameters") or ANY_OBJECT)}
        before = speller.spell(form.before.format(function["name"]))
        rules += [
            f"f{number}: {before} f{number}_json {speller.spell(form.after)}",
            f"f{number}_json: {json_rule(schema)}",
        ]
    start = speller.opening if form is CHANNEL_CALL else speller.spell(form.start)
    more = "" if single or form.single else f" call{{0,{MAX_CALLS - 1}}}"
    calls = " | ".join(f"f{number}" for number in range(len(tools)))
    return "\n".join([f"start: {start} call{more} {speller.spell(form.end)}", f"call: {calls}", *rules])


def channel_format(output: OutputFormat, controls: Mapping[str, int]) -> OutputFormat:
    """Return the format of an answer in channels whose final message has the format `output`. Raises RequestError."""
    match output.kind:
        case "json_schema":
            rule = json_rule(output.content if isinstance(output.content, dict) else {})
        case "regex":
            rule = "/" + re.sub(r"(?<!\\)/", r"\/", str(output.content)).replace("\n", r"\n") + "/"
        case "choice":
            rule = " | ".join(map(quoted, output.content))
        case "lark":
            text = f"{output.param}: this model answers in channels, which a grammar cannot hold. Send a JSON schema."
            raise RequestError(text, param=output.param)
    speller = Speller(controls)
    start = f"start: {speller.opening} {speller.spell('final<|message|>')} answer"
    return OutputFormat("lark", f"{start}\nanswer: {rule}", output.param)
