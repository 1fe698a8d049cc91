"""Formats that cannot be forced: a status of 400 and the path of the part of the schema that is the cause."""

from __future__ import annotations

from typing import Any

import pytest

from proto.params import MAX_GRAMMAR_BYTES
from tests.support.api.api_client import ApiClient, tiny_tokenizer
from tests.support.api.fake_generator import FakeGenerator

BAD_PATTERN = {"type": "string", "pattern": "(("}
IN_AN_ITEM = {"type": "array", "items": {"type": "object", "properties": {"x": BAD_PATTERN}}}
ROOT = "response_format.json_schema.schema"


@pytest.fixture(scope="module")
def api() -> ApiClient:
    """Return an API with a model that answers OK."""
    return ApiClient(FakeGenerator(tiny_tokenizer(), "</think>ok"))


def named(schema: Any) -> dict[str, Any]:
    """Return the format of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "properties": {"a": {"type": "text"}}}, ""),
        ({"properties": {"ok": {"type": "string"}, "a": IN_AN_ITEM}}, ""),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/d"}], "$defs": {"d": BAD_PATTERN}}, ""),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, ""),
        ({"properties": {"a": {"allOf": [{"type": "string"}, {"type": "integer"}]}}}, None),
        ({"properties": {"a": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}}, ""),
        ({"properties": [1]}, ""),
        ({"anyOf": {"type": "string"}}, ""),
    ],
)  # fmt: skip
async def test_a_schema_that_cannot_be_forced_is_a_400_with_its_path(
    api: ApiClient, schema: Any, path: str | None
) -> None:
    """The error names the schema that fails, and the part of it that is no schema."""
    response = await api.chat(response_format=named(schema))
    if path is None:  # a schema that no value has may be refused or compiled
        assert response.status_code in (200, 400)
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == ROOT + path
    assert error["message"].startswith(ROOT + path)


async def test_deep_schemas_are_refused(api: ApiClient) -> None:
    """A schema with too many levels is a client error."""
    schema: Any = {"type": "string"}
    for _ in range(150):
        schema = {"items": schema}
    response = await api.chat(response_format=named(schema))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == ROOT
