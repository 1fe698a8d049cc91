"""The fields of OpenAI's request bodies that force a format, with vLLM's extension."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field, model_validator

from coordinator.api.request.body import Body
from coordinator.api.request.errors import field_error
from coordinator.text.model_info import Json
from coordinator.text.output_format import ANY_OBJECT, OutputFormat


class JsonSchema(Body):
    """The schema of an answer. The server always enforces it."""

    name: str | None = None
    description: str | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of an answer's content."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_fits_the_type(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise field_error("json_schema", "required with the type json_schema, and only then")
        return self

    def output(self) -> OutputFormat | None:
        """Return the internal format."""
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.schema_
        param = "response_format" + (".json_schema.schema" if self.json_schema else "")
        return OutputFormat("json_schema", ANY_OBJECT if schema is None else schema, param)


class StructuredOutputs(Body):
    """vLLM's extension for other formats."""

    json_: Json | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_format(self) -> StructuredOutputs:
        if [self.json_, self.regex, self.grammar, self.choice].count(None) != 3:
            raise ValueError("send one of json, regex, grammar (in Lark) and choice")
        return self

    def output(self) -> OutputFormat:
        """Return the internal format."""
        if self.json_ is not None:
            return OutputFormat("json_schema", self.json_, "structured_outputs.json")
        if self.regex is not None:
            return OutputFormat("regex", self.regex, "structured_outputs.regex")
        if self.grammar is not None:
            return OutputFormat("lark", self.grammar, "structured_outputs.grammar")
        choices = " | ".join(json.dumps(choice) for choice in self.choice or ())
        return OutputFormat("lark", f"start: {choices}", "structured_outputs.choice")
