"""The fields of the Responses API's request body. Unknown fields are rejected by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from coordinator.api.openai_responses.items import Item, MessageItem
from coordinator.api.request.body import Body, Many
from coordinator.api.request.errors import field_error
from coordinator.api.request.reasoning import ReasoningEffort
from coordinator.api.request.settings import GenerationSettings
from coordinator.text.model_info import Json
from coordinator.text.output_format import ANY_OBJECT, OutputFormat


class WebSearchTool(Body):
    """OpenAI's web search, a hint: agents offer it by default, and this server has no search to offer to the model."""

    model_config = ConfigDict(extra="allow")

    type: Literal["web_search", "web_search_preview"]


class Tool(Body):
    """A function that the model may call. OpenAI's other hosted tools are rejected."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None

    def for_template(self) -> Json:
        """Return the tool in the format of chat templates."""
        function: Json = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


class NamedTool(Body):
    """The choice of one tool."""

    type: Literal["function"]
    name: str


class Reasoning(Body):
    """The effort of the reasoning. Summaries are not made: the reasoning itself is in the output."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(Body):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """The format of the text, and a hint."""

    format: TextFormat | None = None
    verbosity: str | None = None


class StreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Body):
    """The body of `POST /v1/responses`."""

    model: str | None = None
    input: str | Many[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Many[Annotated[Tool | WebSearchTool, Field(discriminator="type")]] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    user: str | None = Field(None, max_length=256)

    include: list[Literal["reasoning.encrypted_content"]] | None = None
    metadata: Json | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    client_metadata: Json | None = None

    # Accepted only at the default value, because clients send it.
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ResponsesBody:
        if self.forced_tool is not None and not self.functions:
            raise field_error("tool_choice", "requires tools")
        if self.background and self.store is False:
            raise field_error("background", "requires a stored response. Omit store.")
        if not self.input:
            raise field_error("input", "empty. Send a text or at least one item.")
        if self.user is not None and not self.user.isprintable():
            raise field_error("user", "control characters are invalid, because the label is logged")
        return self

    @property
    def functions(self) -> list[Tool]:
        """The functions among the tools."""
        return [tool for tool in self.tools or () if isinstance(tool, Tool)]

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool that must be called, an empty string for any tool, or None."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.name
        return "" if self.tool_choice == "required" else None

    @property
    def output(self) -> OutputFormat | None:
        """The format of the content."""
        found = self.text.format if self.text else None
        if found is None or found.type == "text":
            return None
        schema: Any = ANY_OBJECT if found.schema_ is None else found.schema_
        return OutputFormat("json_schema", schema, "text.format.schema")

    def settings(self) -> GenerationSettings:
        """Return the settings of the internal request."""
        return GenerationSettings(
            sampling={"temperature": self.temperature, "top_p": self.top_p},
            seed=self.seed,
            max_tokens=self.max_output_tokens,
            field_names={"prompt": "input", "max_tokens": "max_output_tokens"},
        )

    def hints(self) -> Iterator[str]:
        """Yield the hints that the body holds."""
        for name in (
            "metadata",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "client_metadata",
        ):
            if getattr(self, name) is not None:
                yield name
        if self.service_tier not in (None, "auto", "default"):
            yield "service_tier"
        if self.text and self.text.verbosity:
            yield "verbosity"
        if self.include:
            yield "include"
        if self.reasoning and (self.reasoning.summary or self.reasoning.generate_summary):
            yield "reasoning.summary"
        if any(tool.strict for tool in self.functions):
            yield "tools[].strict"
        if len(self.functions) < len(self.tools or ()):
            yield "tools[].web_search"
