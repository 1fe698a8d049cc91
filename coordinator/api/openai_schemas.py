"""The fields of OpenAI's request bodies for chat and text completions. Unknown fields are rejected by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from coordinator.api.errors import field_error
from coordinator.api.request_body import Body, Label, Many, Seed, StopString, hint, shape
from coordinator.api.request_settings import (
    MAX_CHOICES,
    GenerationSettings,
    ReasoningEffort,
    template_tool,
)
from coordinator.text.calls import Json
from coordinator.text.grammars import ANY_OBJECT, OutputFormat


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


SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""The body's fields that are fields of SamplingParams."""


Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=4)],
    shape("a string of 1 to 256 characters, or a list of at most 4 of them"),
]
Prompt = Annotated[
    str | Many[str] | Many[int] | Many[list[int]],
    shape("a string, a list of strings, a list of token ids, or a list of such lists"),
]


class NamedFunction(Body):
    """The function that the model must call."""

    name: str


class NamedTool(Body):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Literal["auto", "none", "required"] | NamedTool,
    shape('auto, none, required or {"type": "function", "function": {"name": …}}'),
]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None
    token_origins: bool | None = None
    """Our extension: each chunk of a chat has one letter for each of its tokens, `d` for an accepted draft."""


class GenerationBody(Body):
    """The fields that chat completions and completions share."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = Field(None, ge=1)
    seed: Seed | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1, description="0, and -1 as vLLM writes it, mean no limit")
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    user: Label | None = None

    metadata: Json | None = hint("metadata")
    prompt_cache_key: str | None = hint("prompt_cache_key")
    prompt_cache_retention: str | None = hint("prompt_cache_retention")
    safety_identifier: str | None = hint("safety_identifier")
    service_tier: str | None = hint("service_tier")
    store: bool | None = hint("store")
    verbosity: str | None = hint("verbosity")
    prediction: Json | None = hint("prediction")

    @model_validator(mode="after")
    def _required_fields_are_set(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "has no effect without stream")
        if self.xtc_threshold is not None and self.xtc_probability is None:
            raise field_error("xtc_threshold", "has no effect without xtc_probability")
        return self

    def generation_settings(
        self, prompt_field: str, limit_field: str, logprobs: int | None
    ) -> GenerationSettings:
        """Return the settings of the internal request. `logprobs` is the number of alternatives of each token."""
        return GenerationSettings(
            sampling={name: getattr(self, name) for name in SAMPLING},
            logit_bias=self.logit_bias or {},
            n=self.n or 1,
            seed=self.seed,
            max_tokens=getattr(self, limit_field),
            stop_strings=[self.stop] if isinstance(self.stop, str) else self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            field_names={
                "prompt": prompt_field,
                "max_tokens": limit_field,
                "parameters": "function.parameters",
            },
        )


class FunctionCall(Body):
    """The function and the arguments of a call in the history."""

    name: str
    arguments: str
    parsed_arguments: Any | None = hint("parsed_arguments")


class MessageToolCall(Body):
    """A call in the history."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str
    cache_control: Any | None = hint("cache_control")


_ROLE_OF_FIELD = {
    "reasoning_content": "assistant",
    "reasoning_details": "assistant",
    "tool_calls": "assistant",
    "tool_call_id": "tool",
}
"""The only role whose messages may have the field."""


class Message(Body):
    """One message. Its fields go to the model's chat template.

    Messages that OpenAI's client returned may be sent back with their null fields.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            str | Many[TextPart],
            shape("a string or a list of text parts. This model reads text only."),
        ]
        | None
    ) = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Many[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_details: list[Any] | None = hint("reasoning_details")
    provider_specific_fields: Any | None = hint("provider_specific_fields")
    thinking_blocks: list[Any] | None = hint("thinking_blocks")
    cache_control: Any | None = hint("cache_control")
    refusal: None = None
    audio: None = None
    function_call: None = None
    parsed: Any | None = hint("parsed")
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message requires content")
        for field, role in _ROLE_OF_FIELD.items():
            if getattr(self, field) is not None and self.role != role:
                raise field_error(field, f"has no effect in a message of the role {self.role}")
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = hint("tools[].strict")


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function
    cache_control: Any | None = hint("cache_control")

    def for_template(self) -> Json:
        """Return the tool as chat templates read it, without hints."""
        return template_tool(
            self.function.name, self.function.description, self.function.parameters
        )


class ChatBody(GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    messages: Many[Message] = Field(min_length=1)
    tools: Many[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None
    reasoning_effort: ReasoningEffort | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", "has no effect without logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and self.max_tokens != self.max_completion_tokens:
            raise field_error("max_completion_tokens", "differs from max_tokens. Send one of them.")
        if self.reasoning_effort and "enable_thinking" in (self.chat_template_kwargs or {}):
            raise field_error(
                "reasoning_effort",
                "conflicts with chat_template_kwargs.enable_thinking. Send one of them.",
            )
        if self.forced_tool is not None and not self.tools:
            raise field_error("tool_choice", "requires tools")
        return self

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool that must be called, an empty string for any tool, or None."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        return "" if self.tool_choice == "required" else None

    @property
    def output(self) -> OutputFormat | None:
        """The format of the content."""
        return None if self.response_format is None else self.response_format.output()

    def settings(self) -> GenerationSettings:
        """Return the settings of the internal request."""
        limit = "max_completion_tokens" if self.max_completion_tokens else "max_tokens"
        alternatives = (self.top_logprobs or 0) if self.logprobs else None
        return self.generation_settings("messages", limit, alternatives)


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    # Accepted only with the values that change nothing, which some clients send.
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionBody:
        if self.echo and self.logprobs is not None:
            raise field_error("echo", "conflicts with logprobs. Send one of them.")
        if self.prompt == []:
            raise field_error("prompt", "the list is empty. Send at least one prompt.")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, of any of the accepted shapes, as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [token for token in self.prompt if isinstance(token, int)]
        return [tokens] if tokens else [p for p in self.prompt if not isinstance(p, int)]

    def settings(self) -> GenerationSettings:
        """Return the settings of the internal request."""
        return self.generation_settings("prompt", "max_tokens", self.logprobs)
