"""Grammars that force tool calls in the format of the checkpoint's family: Qwen3.5's XML form, or Hermes' JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from coordinator.text.model_info import Json

CallStyle = Literal["xml", "json"]

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
    return "\n".join([f"start: call{more}", *rules])


def _json_call(rule: str, function: Json) -> list[str]:
    schema = {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": function.get("parameters") or {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return [f"{rule}: {rule}_json {_text(chr(10))}", f"{rule}_json: %json {json.dumps(schema)}"]


def _xml_call(rule: str, function: Json) -> list[str]:
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    required = set(parameters.get("required") or ())
    rules, items = [], []
    for number, (name, schema) in enumerate(properties.items()):
        item = f"{rule}_p{number}"
        items.append(item if name in required else f"{item}?")
        opening = _text(f"<parameter={name}>\n")
        value, extra = _xml_value(f"{item}_v", schema, parameters)
        rules += [f"{item}: {opening} {value}", *extra]
    opening = _text(f"<function={function['name']}>\n")
    head = f"{rule}: {' '.join([opening, *items, _text('</function>' + chr(10))])}"
    return [head, *rules]


def _xml_value(rule: str, schema: Any, parameters: Json) -> tuple[str, list[str]]:
    """Return the expression of a value with the end of its parameter, and the rules it uses."""
    closing = "\n</parameter>\n"
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string" and isinstance(schema.get("enum"), list):
        choices = " | ".join(_text(str(choice)) for choice in schema["enum"])
        return f"({choices}) {_text(closing)}", []
    if kind == "string" or kind is None:
        return rule, [f"{rule}[suffix={_text(closing)}]: /(?s:.*)/"]
    definitions = {
        name: parameters[name] for name in ("$defs", "definitions") if name in parameters
    }
    whole = {**schema, **definitions}
    return f"{rule} {_text(closing)}", [f"{rule}: %json {json.dumps(whole)}"]


def _text(text: str) -> str:
    return json.dumps(text)
