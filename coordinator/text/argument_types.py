"""The types of a tool's arguments, and the conversion of an argument's text to JSON."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from coordinator.text.model_info import Json

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
