"""Grammars for llguidance: output formats, JSON schemas and forced tool calls, with errors that name the cause."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llguidance import LLMatcher, LLTokenizer

from coordinator.text.calls import ArgumentTypes, CallStyle, Json
from mtp.sampling.grammar import Vocabulary, grammar_problem
from proto.errors import RequestError
from proto.params import MAX_GRAMMAR_BYTES

if TYPE_CHECKING:  # at run time it would take seconds in the process that compiles grammars
    from coordinator.text.tokenizer import Tokenizer

_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}

_MAPS = ("$defs", "definitions", "properties", "patternProperties")
"""Keywords whose value has a schema for each key."""

_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords whose value is a list of schemas."""

_SCHEMAS = ("items", "additionalProperties", "not")
"""Keywords whose value is a schema."""

MAX_LEVELS = 100
"""Maximum number of schemas inside each other, so that no recursion exceeds Python's limit."""


def check_schema(schema: Any, path: str, level: int = 0) -> None:
    """Raise RequestError with the path of the first value that is not a schema, as far as types show it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise RequestError(f"{path}: a schema is an object, not {schema!r:.60}", param=path)
    if level > MAX_LEVELS:
        raise RequestError(f"{path}: more than {MAX_LEVELS} levels. Use $ref.", param=path)
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise RequestError(f"{path}.type: {kind!r:.60} is not a type", param=f"{path}.type")
    for names, required in ((_MAPS, dict), (_LISTS, list)):
        for name in names:
            if not isinstance(schema.get(name, required()), required):
                noun = "an object" if required is dict else "a list"
                raise RequestError(f"{path}.{name}: {noun} is required", param=f"{path}.{name}")
    for inner, member in _members(schema, path):
        check_schema(member, inner, level + 1)


def _members(schema: Json, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside `schema`, with their paths."""
    for name in _MAPS:
        for key, member in schema.get(name, {}).items():
            yield f"{path}.{name}.{key}", member
    for name in _LISTS:
        for index, member in enumerate(schema.get(name, [])):
            yield f"{path}.{name}[{index}]", member
    for name in _SCHEMAS:
        if name in schema:
            yield f"{path}.{name}", schema[name]


FormatKind = Literal["json_schema", "lark", "regex", "choice"]

WHITESPACE = " ?"
"""The whitespace between JSON tokens. More of it has no meaning, and a model may repeat it until the answer's limit."""


@dataclass(frozen=True)
class OutputFormat:
    """The format of an answer's content.

    `content` is a schema, a regular expression, a list of texts or, for forced calls, a Lark grammar.

    `param` is the client's field that holds the content, for errors.
    """

    kind: FormatKind
    content: Any
    param: str


ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of any JSON object."""


def pack_vocabulary(tokenizer: Tokenizer) -> bytes:
    """Return the packed vocabulary of a tokenizer, which the last stage needs to apply a grammar.

    It is empty for a tokenizer without end tokens, which formats require.
    """
    if not tokenizer.eos_ids:
        return b""
    tokens = map(tokenizer.token_bytes, range(tokenizer.vocab_size))
    return Vocabulary.of_backend(
        tokenizer.backend, tokens, tokenizer.control_ids, tokenizer.eos_ids
    ).pack()


def compile_format(output: OutputFormat, tokenizer: LLTokenizer) -> bytes:
    """Return the grammar of a format, after a trial of its cost.

    Blocks without a bound, so a server calls it in a `GrammarProcess`. Raises RequestError, naming the client's field,
    for a format that is invalid, unsupported, too large, or too slow to apply.
    """
    grammar = _grammar_text(output)
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"{output.param}: {len(grammar)} bytes exceed the limit of {MAX_GRAMMAR_BYTES}. Send a smaller format.",
            param=output.param,
        )
    if problem := grammar_problem(grammar, tokenizer):
        raise RequestError(
            f"{output.param}: the format cannot be compiled: {problem:.400}", param=output.param
        )
    return grammar.encode()


def _grammar_text(output: OutputFormat) -> str:
    match output.kind:
        case "json_schema":
            check_schema(output.content, output.param)
            options: Any = {"whitespace_pattern": WHITESPACE}
            schema = json.dumps(output.content)
            return str(LLMatcher.grammar_from_json_schema(schema, defaults=options))
        case "lark":
            return str(LLMatcher.grammar_from_lark(str(output.content)))
        case "regex":
            return str(LLMatcher.grammar_from_regex(output.content))
        case "choice":
            return str(
                LLMatcher.grammar_from_lark("start: " + " | ".join(map(_text, output.content)))
            )


MAX_CALLS = 16
"""Maximum number of calls in one forced answer. Without a limit a model may repeat calls until the answer's limit."""


def call_grammar(
    tools: Sequence[Json], style: CallStyle, markers: tuple[str, str], *, single: bool
) -> str:
    """Return a Lark grammar of one call, or of one to MAX_CALLS calls, of the given tools.

    `tools` are in OpenAI's format; `markers` are the texts around a call. Arguments follow the tools' schemas.
    """
    start, end = markers
    body = _xml_call if style == "xml" else _json_call
    rules = [
        f"call: {_text(start + chr(10))} ({' | '.join(f'f{i}' for i in range(len(tools)))}) {_text(end)}"
    ]
    for number, tool in enumerate(tools):
        rules += body(f"f{number}", tool["function"])
    more = "" if single else f" ({_text(chr(10))} call){{0,{MAX_CALLS - 1}}}"
    return "\n".join([f"start: call{more}", *rules, *(_TEXT_RULES if style == "xml" else ())])


def _json_call(rule: str, function: Json) -> list[str]:
    parameters = dict(function.get("parameters") or ANY_OBJECT)
    parameters.pop("$schema", None)  # it stands at the root of a schema only
    schema = {
        **_definitions(parameters),
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return [f"{rule}: {rule}_json {_text(chr(10))}", f"{rule}_json: {_json_rule(schema)}"]


_CLOSING = r"/\n?<\/parameter>\n/"
"""The end of a parameter, as the parser of calls reads it."""

_TEXT_RULES = (
    f"text[suffix={_CLOSING}]: TEXT",
    r"TEXT: /(?s:.*)/ & ~/(?s:.*)<\/(parameter|function|tool_call)>(?s:.*)/",
)
"""The rules of a string with the end of its parameter. No string contains the end of a parameter, function or call."""


def _xml_call(rule: str, function: Json) -> list[str]:
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    required = set(parameters.get("required") or ())
    rules, items = [], []
    for number, name in enumerate(properties):
        item = f"{rule}_p{number}"
        items.append(item if name in required else f"{item}?")
        opening = _text(f"<parameter={name}>\n")
        value, extra = _xml_value(f"{item}_v", name, function)
        rules += [f"{item}: {opening} {value}", *extra]
    opening = _text(f"<function={function['name']}>\n")
    head = f"{rule}: {' '.join([opening, *items, _text('</function>' + chr(10))])}"
    return [head, *rules]


def _xml_value(rule: str, name: str, function: Json) -> tuple[str, list[str]]:
    """Return the expression of an argument's value with the end of its parameter, and the rules it uses."""
    parameters = function["parameters"]
    schema = parameters["properties"][name]
    kinds = ArgumentTypes([{"function": function}]).kinds(function["name"], name)
    if isinstance(schema, dict) and kinds == {"string"}:
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices and isinstance(choices, list):
            return f"({' | '.join(_text(str(choice)) for choice in choices)}) {_CLOSING}", []
    if not kinds or "string" in kinds:
        return "text", []
    return f"{rule} {_CLOSING}", [f"{rule}: {_json_rule({**schema, **_definitions(parameters)})}"]


def _definitions(parameters: Json) -> Json:
    """Return the schemas that references in `parameters` name."""
    return {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}


def _json_rule(schema: Json) -> str:
    """Return the expression of a JSON text with a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def _text(text: str) -> str:
    return json.dumps(text)
