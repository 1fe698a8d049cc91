"""The fields of Anthropic's request bodies. Unknown fields are rejected by name; hints are in `request.hints`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from coordinator.api.request.body import Body, Many
from coordinator.api.request.errors import field_error
from coordinator.text.model_info import Json
from coordinator.text.output_format import OutputFormat

MAX_STOP = 64
"""Maximum number of stop sequences: the end of the text is compared with each of them at every token."""

StopSequence = Annotated[str, Field(min_length=1, max_length=256)]


class TextBlock(Body):
    """Text of a message, of the system prompt or of a tool's result."""

    type: Literal["text"]
    text: str
    citations: None = None
    cache_control: Any | None = None


class ThinkingBlock(Body):
    """Reasoning of an earlier answer, sent back."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Encrypted reasoning of another model, which this model cannot read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Any
    cache_control: Any | None = None
    caller: Any | None = None


class ToolResultBlock(Body):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Any | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Message(Body):
    """One message. System messages may stand anywhere."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]

    @property
    def blocks(self) -> list[Block]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> Message:
        allowed = {
            "user": (TextBlock, ToolResultBlock),
            "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
            "system": (TextBlock,),
        }
        for block in self.blocks:
            if not isinstance(block, allowed[self.role]):
                raise field_error(
                    "content", f"a {block.type} block is invalid in a message of role {self.role}"
                )
        return self


class Tool(Body):
    """A tool of the client."""

    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: Json
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    cache_control: Any | None = None

    def for_template(self) -> Json:
        """Return the tool in OpenAI's format, as chat templates read it."""
        function: Json = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolChoice(Body):
    """The tools that the model may call, or must call."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """The switch and the budget of reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: str | None = None


class OutputSchema(Body):
    """The schema of an answer's text."""

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Body):
    """The effort and the format of an answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputSchema | None = None


class PromptBody(Body):
    """The fields that decide the prompt."""

    model: str | None = None
    messages: Many[Message] = Field(min_length=1)
    system: str | Many[TextBlock] | None = None
    tools: Many[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputSchema | None = None
    context_management: Json | None = None
    cache_control: Any | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> PromptBody:
        if self.messages[-1].role == "assistant":
            raise field_error("messages", "the last message must have the role user")
        if self.thinking and self.thinking.type == "enabled" and not self.thinking.budget_tokens:
            raise field_error("thinking", "budget_tokens is required with the type enabled")
        choice = self.tool_choice
        if choice and (choice.type == "tool") != (choice.name is not None):
            raise field_error("tool_choice", "name is required with the type tool, and only then")
        if self.forced_tool is not None and not self.tools:
            raise field_error("tool_choice", "requires tools")
        return self

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool that must be called, an empty string for any tool, or None."""
        if self.tool_choice is None or self.tool_choice.type not in ("any", "tool"):
            return None
        return self.tool_choice.name or ""

    @property
    def output(self) -> OutputFormat | None:
        """The format of the text."""
        inner = self.output_config.format if self.output_config else None
        if found := inner or self.output_format:
            param = "output_config.format.schema" if inner else "output_format.schema"
            return OutputFormat("json_schema", found.schema_, param)
        return None

    @property
    def system_text(self) -> str:
        """The system prompt as one text."""
        blocks = self.system or []
        if isinstance(blocks, str):
            return blocks
        return "\n\n".join(block.text for block in blocks)

    def hints(self) -> Iterator[str]:
        """Yield the hints that the body holds."""
        blocks: list[Any] = [block for message in self.messages for block in message.blocks]
        blocks += self.system if isinstance(self.system, list) else []
        if any(
            getattr(each, "cache_control", None) for each in (self, *blocks, *(self.tools or ()))
        ):
            yield "cache_control"
        if any(tool.strict for tool in self.tools or ()):
            yield "tools[].strict"
        if any(tool.eager_input_streaming for tool in self.tools or ()):
            yield "tools[].eager_input_streaming"
        if self.context_management is not None:
            yield "context_management"


class MessagesBody(PromptBody):
    """The body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: list[StopSequence] | None = Field(None, max_length=MAX_STOP)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=0)
    metadata: Json | None = None
    service_tier: str | None = None

    def hints(self) -> Iterator[str]:
        """See PromptBody."""
        yield from super().hints()
        if self.metadata is not None:
            yield "metadata"
        if self.service_tier not in (None, "auto", "standard_only"):
            yield "service_tier"


class CountBody(PromptBody):
    """The body of `POST /v1/messages/count_tokens`."""
