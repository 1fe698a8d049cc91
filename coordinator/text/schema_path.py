"""Paths inside JSON schemas, for errors that name the part of a schema that is the cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from proto.errors import RequestError

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
    for inner, member in members(schema, path):
        check_schema(member, inner, level + 1)


def members(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside `schema`, with their paths."""
    if not isinstance(schema, dict):
        return
    for name in _MAPS:
        for key, member in schema.get(name, {}).items():
            yield f"{path}.{name}.{key}", member
    for name in _LISTS:
        for index, member in enumerate(schema.get(name, [])):
            yield f"{path}.{name}[{index}]", member
    for name in _SCHEMAS:
        if name in schema:
            yield f"{path}.{name}", schema[name]


MAX_TRIALS = 300
"""Maximum number of parts that are tried to find the cause of an error. Each takes about a millisecond."""


def path_of_cause(schema: Any, path: str, fails: Callable[[Any], bool]) -> str:
    """Return the path of the innermost schema that `fails` on its own, given that `schema` fails.

    Each part is tried with the definitions of the whole schema, so that its references lead somewhere.
    """
    trials = MAX_TRIALS
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    part = schema
    while True:
        for inner, member in members(part, path):
            trials -= 1
            if trials < 0:
                return path
            if isinstance(member, dict) and fails({**shared, **member}):
                part, path = member, inner
                break
        else:
            return path
