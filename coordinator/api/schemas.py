"""The fields of a request body. What is listed here has an effect, or is taken at the one value that needs none.

Every other field, and every other value of those, is refused by name. A null is the same as leaving the field
out. Numbers are checked by `proto.params.SamplingParams`, what depends on the model by `prompt`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from coordinator.model_info import Json

MAX_CHOICES = 128
"""Most answers one HTTP request may ask for; OpenAI's limit on `n`."""

MAX_STOP = 4
"""Most stop strings; OpenAI's limit."""

MAX_STOP_CHARACTERS = 256
"""Longest stop string: the end of the text is compared with it at every token."""


def _shape(description: str) -> WrapValidator:
    """One message for a union of types, in place of one for each of its members."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("shape", "give {what}", {"what": description}) from error

    return WrapValidator(check)


Stop = Annotated[str | list[str], _shape("a string or a list of strings")]
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    _shape("a string, a list of strings, a list of token ids, or a list of such lists"),
]
ToolChoice = Annotated[Literal["auto", "none"], _shape("auto or none; no other choice is enforced")]


class Body(BaseModel):
    """Nothing unknown, nothing converted: `"1"` is no number and `1` is no truth value."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(Body):
    """What chat and text completions have in common."""

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
    top_k: int | None = Field(None, ge=-1, description="-1, as vLLM writes it, and 0 are off")
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    user: str | None = Field(None, description="the client's own label; never kept")

    @field_validator("stop", mode="after")
    @classmethod
    def _stop_is_bounded(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > MAX_STOP:
            raise ValueError(f"at most {MAX_STOP} stop strings")
        if not all(0 < len(string) <= MAX_STOP_CHARACTERS for string in strings):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
        return stop

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options has no effect without stream")
        return self

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class FunctionCall(Body):
    name: str
    arguments: str
    parsed_arguments: None = None


class MessageToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class Message(Body):
    """One turn. What its fields do is up to the model's chat template, to which they all go.

    The null fields in the messages OpenAI's client returns may be sent back.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    parsed: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_text_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise ValueError(f"this model reads text parts only, not {kind or 'others'}")
            if set(part) != {"type", "text"} or not isinstance(part["text"], str):
                raise ValueError("a text part has a type and a text, nothing else")
        return "".join(part["text"] for part in content)

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message has content")
        return self


class Function(Body):
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: Literal[False] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class TextFormat(Body):
    type: Literal["text"]


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: Json | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    # Taken at the value that needs no doing, because clients send it.
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs has no effect without logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are one limit: give one of them")
        return self


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=20)

    # Taken at the value that needs no doing.
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
