"""The schemas of tools' arguments: references and `allOf` resolved once, the types of values, and values in text."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

Json = dict[str, Any]
"""An object of JSON."""

Kinds = frozenset[str]
"""Names of JSON Schema's types; empty for a schema that does not say."""

MAX_DEPTH = 8
"""Levels of references and unions that are followed, so that a reference to itself ends."""

MOST_MEMBERS = 64
"""Schemas of one argument that are looked at. A union of references to itself has any number."""

DEFINITIONS = ("$defs", "definitions")


def resolved(schema: Any, root: Json, depth: int = MAX_DEPTH) -> Json:
    """Return `schema` with its own `$ref` and `allOf` replaced by what they stand for.

    What cannot be joined, such as two patterns, stays in `allOf`. Schemas inside it keep their references to `root`.
    """
    if not isinstance(schema, dict) or depth == 0:
        return {}
    found = dict(schema)
    reference = found.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        del found["$ref"]
        found = _joined(resolved(_target(reference, root), root, depth - 1), found)
    members = found.pop("allOf", None)
    for member in members if isinstance(members, list) else ():
        found = _joined(found, resolved(member, root, depth - 1))
    return found


def _target(reference: str, root: Json) -> Any:
    target: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, dict) else None
    return target


LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems")
MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_types(value: Any) -> bool:
    return all(isinstance(each, str) for each in (value if isinstance(value, list) else [value]))


def _joined(one: Json, other: Json) -> Json:
    """Return the schema of values that fit both."""
    both, apart = dict(one), {}
    for key, value in other.items():
        held = both.get(key, value)
        if held == value or key in ("title", "description", "default", "examples"):
            both[key] = value
        elif key == "properties" and isinstance(held, dict) and isinstance(value, dict):
            shared = {name: {"allOf": [held[name], value[name]]} for name in held.keys() & value}
            both[key] = {**held, **value, **shared}
        elif key == "required" and isinstance(held, list) and isinstance(value, list):
            both[key] = list(dict.fromkeys([*held, *value]))
        elif key == "enum" and isinstance(held, list) and isinstance(value, list):
            both[key] = [each for each in held if each in value]
        elif key == "type" and _are_types(held) and _are_types(value):
            both[key] = _shared_types(held, value)
        elif key in LEAST and _is_number(held) and _is_number(value):
            both[key] = max(held, value)
        elif key in MOST and _is_number(held) and _is_number(value):
            both[key] = min(held, value)
        elif key in DEFINITIONS and isinstance(held, dict) and isinstance(value, dict):
            both[key] = {**value, **held}
        else:
            apart[key] = value
    if apart:
        both["allOf"] = [*both.get("allOf", []), apart]
    return both


def _shared_types(one: Any, other: Any) -> Any:
    first, second = ({*(v if isinstance(v, list) else [v])} for v in (one, other))
    shared = first & second
    if "number" in first | second and "integer" in first | second:
        shared.add("integer")
    return next(iter(shared)) if len(shared) == 1 else sorted(shared)


def members(schema: Any, root: Json, depth: int = MAX_DEPTH) -> Iterator[Json]:
    """Yield the resolved schemas of which a value fits one: those of a union, or the schema itself."""
    found = resolved(schema, root, depth)
    for name in ("anyOf", "oneOf"):
        union = found.get(name)
        if isinstance(union, list) and union and depth:
            rest = {key: value for key, value in found.items() if key != name}
            for member in union:
                yield from members(_joined(rest, resolved(member, root)), root, depth - 1)
            return
    kind = found.get("type")
    for each in kind if isinstance(kind, list) and len(kind) > 1 else [kind]:
        yield found if each is None else {**found, "type": each}


class ToolSchemas:
    """The functions that a client declared, with their arguments' schemas."""

    def __init__(self, tools: Sequence[Json]) -> None:
        self.tools = tools
        functions = [tool["function"] for tool in tools]
        self._parameters = {each["name"]: each.get("parameters") or {} for each in functions}
        self._resolved: dict[str, Json] = {}

    def declares(self, function: str) -> bool:
        """Return whether the client declared `function`. A call of another one is text."""
        return function in self._parameters

    def parameters(self, function: str) -> Json:
        """Return the resolved schema of the object of arguments."""
        if function not in self._resolved:
            sent = self._parameters.get(function)
            root = sent if isinstance(sent, dict) else {}
            self._resolved[function] = resolved(root, root)
        return self._resolved[function]

    def properties(self, function: str) -> Json:
        """Return the schemas of the arguments by name."""
        found = self.parameters(function).get("properties")
        return found if isinstance(found, dict) else {}

    def members(self, function: str, argument: str) -> list[Json]:
        """Return the resolved schemas of which an argument fits one. One that has no schema is a string."""
        schema = self.properties(function).get(argument, {"type": "string"})
        return list(islice(members(schema, self._parameters.get(function, {})), MOST_MEMBERS))

    def kinds(self, function: str, argument: str) -> Kinds:
        """Return the types of an argument."""
        return frozenset(kind for member in self.members(function, argument) for kind in kinds_of(member))


def kinds_of(member: Json) -> Iterator[str]:
    """Yield the types that a schema of `members` allows."""
    if isinstance(kind := member.get("type"), str):
        yield kind
        return
    values = member.get("enum", [member["const"]] if "const" in member else [])
    for value in values if isinstance(values, list) else []:
        yield kind_of(value)


def kind_of(value: Any) -> str:
    """Return JSON Schema's type of a value of JSON."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null" if value is None else "")


def json_of(text: str, kinds: Kinds) -> str:
    """Return the JSON of an argument's text.

    A text that no other type of `kinds` fits is a string, so that the client can tell the model what is wrong. Without
    `kinds` only objects and lists are JSON, and other text is a string. Python's notation of values is accepted too.
    """
    if text.strip().lower() in ("null", "none") and ("null" in kinds or (kinds and "string" not in kinds)):
        return "null"
    for value in () if "string" in kinds and kinds <= {"string", "null"} else _readings(text):
        kind = kind_of(value)
        if kind == "string":
            continue  # quotes around a string belong to it
        if kind == "number" and "number" not in kinds and float(value).is_integer():
            value, kind = int(value), "integer"
        fits = kind in kinds or (kind == "integer" and "number" in kinds)
        if (fits or (not kinds and kind in ("object", "array"))) and (found := dumps(value)):
            return found
    return json.dumps(text, ensure_ascii=False)


def _readings(text: str) -> Iterator[Any]:
    """Yield the values that `text` may mean, as JSON and as Python."""
    with suppress(ValueError, RecursionError):
        yield json.loads(text, strict=False, parse_constant=lambda name: name)
    lower = text.strip().lower()
    if lower in ("true", "false"):
        yield lower == "true"
        return
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        yield ast.literal_eval(text)


def dumps(value: Any) -> str | None:
    """Return a value as JSON, or None for one that JSON does not have. Half a pair of UTF-16 becomes U+FFFD."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except (ValueError, TypeError, RecursionError):  # Python's notation also has sets and bytes
        return None
