"""The fields of OpenAI's request bodies.

A field that is accepted has an effect, or is a hint (see `request.hints`). Every other field is rejected by name. A
null is the same as an omitted field. SamplingParams checks the ranges of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from coordinator.api.openai_chat.formats import ResponseFormat, StructuredOutputs
from coordinator.api.request.body import Body, Many
from coordinator.api.request.errors import field_error
from coordinator.api.request.reasoning import ReasoningEffort
from coordinator.api.request.settings import MAX_CHOICES, GenerationSettings
from coordinator.text.model_info import Json
from coordinator.text.output_format import OutputFormat

MAX_STOP = 4
"""Maximum number of stop strings; OpenAI's limit."""

MAX_STOP_CHARACTERS = 256
"""Maximum length of a stop string: the end of the text is compared with it at every token."""

MAX_USER = 256
"""Maximum length of `user` in characters: it becomes part of a log line."""

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


def _shape(description: str) -> WrapValidator:
    """Return a validator with one message for a union of types, instead of one per type."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Validate `value`, with one message for all types of the union."""
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("shape", "send {what}", {"what": description}) from error

    return WrapValidator(check)


Stop = Annotated[str | list[str], _shape("a string or a list of strings")]
Prompt = Annotated[
    str | Many[str] | Many[int] | Many[list[int]],
    _shape("a string, a list of strings, a list of token ids, or a list of such lists"),
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
    _shape('auto, none, required or {"type": "function", "function": {"name": …}}'),
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

    prompt_field: ClassVar[str]
    """The field that holds the prompt."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)

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

    user: str | None = Field(None, max_length=MAX_USER, description="a label for the log")
    structured_outputs: StructuredOutputs | None = None

    metadata: Json | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    verbosity: str | None = None
    prediction: Json | None = None

    @field_validator("stop", mode="after")
    @classmethod
    def _stop_is_bounded(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > MAX_STOP:
            raise ValueError(f"send at most {MAX_STOP} stop strings")
        if not all(0 < len(string) <= MAX_STOP_CHARACTERS for string in strings):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
        return stop

    @field_validator("user", mode="after")
    @classmethod
    def _user_is_printable(cls, user: str | None) -> str | None:
        if user is not None and not user.isprintable():
            raise ValueError("control characters are invalid, because the label is logged")
        return user

    @model_validator(mode="after")
    def _required_fields_are_set(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "has no effect without stream")
        if self.xtc_threshold is not None and self.xtc_probability is None:
            raise field_error("xtc_threshold", "has no effect without xtc_probability")
        return self

    def hints(self) -> Iterator[str]:
        """Yield the hints that the body holds."""
        # Clients send the usual service tiers as their defaults.
        if self.service_tier not in (None, "auto", "default"):
            yield "service_tier"
        for name in (
            "metadata",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "verbosity",
            "prediction",
        ):
            if getattr(self, name) is not None:
                yield name

    def settings(self) -> GenerationSettings:
        """Return the settings of the internal request."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return GenerationSettings(
            sampling={name: getattr(self, name) for name in SAMPLING},
            logit_bias=self.logit_bias or {},
            n=self.n or 1,
            seed=self.seed,
            max_tokens=self.limit,
            stop_strings=stop,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.alternatives,
            field_names={
                "prompt": self.prompt_field,
                "max_tokens": self.limit_field,
                "parameters": "function.parameters",
            },
        )

    @property
    def limit_field(self) -> str:
        """The field in which the client sent the token limit."""
        return "max_tokens"

    @property
    def limit(self) -> int | None:
        """The client's token limit."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives reported per token; None for no log-probabilities."""
        raise NotImplementedError


class FunctionCall(Body):
    """The function and the arguments of a call in the history."""

    name: str
    arguments: str
    parsed_arguments: None = None


class MessageToolCall(Body):
    """A call in the history."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


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
    content: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Many[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_details: list[Any] | None = None
    provider_specific_fields: Any | None = None
    thinking_blocks: list[Any] | None = None
    cache_control: Any | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    parsed: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _join_text_parts(cls, message: Any) -> Any:
        if not isinstance(message, dict) or not isinstance(message.get("content"), list):
            return message
        texts = []
        message = dict(message)
        for part in message["content"]:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise field_error(
                    "content",
                    f"this model reads text parts only, not {kind or 'other values'}. Remove them.",
                )
            if not {"type", "text"} <= set(part) <= {"type", "text", "cache_control"} or not (
                isinstance(part["text"], str)
            ):
                raise field_error("content", "a text part has the fields type and text only")
            if part.get("cache_control") is not None:
                message["cache_control"] = part["cache_control"]
            texts.append(part["text"])
        return {**message, "content": "".join(texts)}

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message requires content")
        for field, role in _ROLE_OF_FIELD.items():
            if getattr(self, field) is not None and self.role != role:
                raise field_error(field, f"has no effect in a message of the role {self.role}")
        return self


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function
    cache_control: Any | None = None

    def for_template(self) -> Json:
        """Return the tool as chat templates read it, without hints."""
        function = self.function.model_dump(exclude_unset=True, exclude={"strict"})
        return {"type": "function", "function": function}


class ChatBody(GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    prompt_field = "messages"

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

    # Accepted only at the default value, because clients send it.
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
        if self.structured_outputs and self.response_format:
            raise field_error("structured_outputs", "conflicts with response_format")
        if self.store and self.stream and (self.n or 1) > 1:
            raise field_error("store", "a stored stream has one choice. Omit n, store or stream.")
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
        if self.structured_outputs is not None:
            return self.structured_outputs.output()
        return None if self.response_format is None else self.response_format.output()

    def hints(self) -> Iterator[str]:
        """See GenerationBody."""
        yield from super().hints()
        for name in ("reasoning_details", "provider_specific_fields", "thinking_blocks"):
            if any(getattr(message, name) for message in self.messages):
                yield name
        if any(part.cache_control is not None for part in (*self.messages, *(self.tools or ()))):
            yield "cache_control"
        if any(tool.function.strict for tool in self.tools or ()):
            yield "tools[].strict"

    @property
    def limit_field(self) -> str:
        """See GenerationBody."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def limit(self) -> int | None:
        """See GenerationBody."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """See GenerationBody."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt_field = "prompt"

    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None

    # Accepted only at the default value, because clients send it.
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    max_tokens: int | None = Field(None, ge=0, description="0 requires echo and logprobs")

    @model_validator(mode="after")
    def _scored_prompts_have_no_stops(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.scores_prompt:
            raise field_error("max_tokens", "0 requires echo and logprobs")
        for name in ("stop", "structured_outputs"):
            if self.scores_prompt and getattr(self, name) is not None:
                raise field_error(name, "is not supported with echo and logprobs")
        return self

    def hints(self) -> Iterator[str]:
        """See GenerationBody."""
        yield from super().hints()
        if self.store:
            yield "store"

    @property
    def scores_prompt(self) -> bool:
        """True if the client requests the log-probabilities of the prompt."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def alternatives(self) -> int | None:
        """See GenerationBody."""
        return self.logprobs
