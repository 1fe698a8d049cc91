"""JSON schemas for the bench of grammar libraries: some to compile, and some with valid and invalid instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A schema and instances, each with whether it is valid."""

    name: str
    schema: Json
    instances: Sequence[tuple[Any, bool]]


def _object(**properties: Any) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


REPORT = _object(
    temperature_celsius={"type": "integer", "minimum": -50, "maximum": 60},
    wind_direction={"enum": ["north", "east", "south", "west"]},
    humidity_percent={"type": "integer", "minimum": 0, "maximum": 100},
    description={"type": "string", "maxLength": 30},
    is_raining={"type": "boolean"},
)
"""A flat object with long names, as structured output often is."""

_EDIT = _object(
    path={"type": "string"},
    old={"type": "string"},
    new={"type": "string"},
    all={"type": "boolean"},
)

SCHEMAS: dict[str, Json] = {
    "flat": REPORT,
    "nested": _object(
        title={"type": "string", "minLength": 1},
        edits={"type": "array", "items": _EDIT, "minItems": 1, "maxItems": 20},
        owner={"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}]},
        when={"type": "string", "format": "date-time"},
    ),
    "30 tools": {
        "anyOf": [
            _object(
                name={"const": f"tool_{number}"},
                arguments=_object(
                    **{
                        f"field_{i}": {"type": ["string", "integer", "boolean"][i % 3]}
                        for i in range(6)
                    }
                ),
            )
            for number in range(30)
        ]
    },
}
"""The schemas whose compilation is timed."""

_TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": _object(
            value={"type": "integer"},
            children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        )
    },
}

CASES = (
    Case("report", REPORT, [
        ({"temperature_celsius": -7, "wind_direction": "east", "humidity_percent": 100,
          "description": "clear", "is_raining": False}, True),
        ({"temperature_celsius": 61, "wind_direction": "east", "humidity_percent": 1,
          "description": "", "is_raining": True}, False),
    ]),
    Case("minimum and maximum", {"type": "integer", "minimum": 3, "maximum": 17},
         [(3, True), (17, True), (2, False), (18, False), (170, False)]),
    Case("number above 0", {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
         [(0.5, True), (1, True), (0, False), (-0.1, False), (1.5, False)]),
    Case("multiple of 5", {"type": "integer", "multipleOf": 5}, [(15, True), (12, False)]),
    Case("length", {"type": "string", "minLength": 2, "maxLength": 4},
         [("ab", True), ("äöüß", True), ("a", False), ("abcde", False)]),
    Case("escapes", {"type": "string", "maxLength": 3}, [('"\n\\', True), ('"\n\\x', False)]),
    Case("pattern", {"type": "string", "pattern": "^[a-f]+-[0-9]{2}$"},
         [("abc-12", True), ("abc-1", False), ("x-12", False)]),
    Case("date", {"type": "string", "format": "date"},
         [("2026-02-28", True), ("2026-13-01", False), ("today", False)]),
    Case("uuid", {"type": "string", "format": "uuid"},
         [("123e4567-e89b-12d3-a456-426614174000", True), ("123", False)]),
    Case("items", {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
         [([True], True), ([True, False, True], True), ([], False), ([True] * 4, False), ([1], False)]),
    Case("tuple", {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}],
                   "items": False, "minItems": 2},
         [([1, "a"], True), (["a", 1], False), ([1, "a", 2], False)]),
    Case("optional", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
                      "required": ["b"], "additionalProperties": False},
         [({"b": None}, True), ({"a": 1, "b": None}, True), ({"a": 1}, False), ({"b": None, "c": 1}, False)]),
    Case("additional", {"type": "object", "properties": {"a": {"type": "integer"}},
                        "additionalProperties": {"type": "string"}},
         [({"a": 1, "x": "y"}, True), ({"a": 1, "x": 2}, False), ({"x": "y"}, True)]),
    Case("constants", {"enum": ["a", 1, None, [2], {"k": True}]},
         [("a", True), (1, True), (None, True), ([2], True), ({"k": True}, True), ("b", False)]),
    Case("any of", {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 5}]},
         [("ab", True), (7, True), ("abc", False), (4, False)]),
    Case("all of", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
         [(4, True), (2, False), (6, False)]),
    Case("recursion", _TREE, [
        ({"value": 1, "children": [{"value": 2, "children": []}]}, True),
        ({"value": 1, "children": [{"value": "2", "children": []}]}, False),
    ]),
)  # fmt: skip
"""Schemas with instances. Objects have their properties in the order of the schema, as the libraries write them."""
