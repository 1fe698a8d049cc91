"""The fields of a request body. What is listed here has an effect, or is taken at the one value that needs none.

Every other field, and every other value of those, is refused by name. A null is the same as leaving the field
out. Numbers are checked by `proto.params.SamplingParams`, what depends on the model by `prompt`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

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

from coordinator.text.model_info import Json

MAX_CHOICES = 128
"""Most answers one HTTP request may ask for; OpenAI's limit on `n`."""

MAX_STOP = 4
"""Most stop strings; OpenAI's limit."""

MAX_STOP_CHARACTERS = 256
"""Longest stop string: the end of the text is compared with it at every token."""

MAX_USER = 256
"""Longest `user`, in characters: it goes into a line of the log."""

FIELD = "field"
"""Type of an error of a whole object that is one field's fault: its context names that field."""


def _fault(field: str, problem: str) -> PydanticCustomError:
    return PydanticCustomError(FIELD, "{problem}", {"field": field, "problem": problem})


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

    prompt_field: ClassVar[str]
    """Where the client put the prompt."""

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

    user: str | None = Field(None, max_length=MAX_USER, description="goes into the log")

    @field_validator("stop", mode="after")
    @classmethod
    def _stop_is_bounded(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > MAX_STOP:
            raise ValueError(f"at most {MAX_STOP} stop strings")
        if not all(0 < len(string) <= MAX_STOP_CHARACTERS for string in strings):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
        return stop

    @field_validator("user", mode="after")
    @classmethod
    def _user_can_be_shown(cls, user: str | None) -> str | None:
        if user is not None and not user.isprintable():
            raise ValueError("it goes into the log: no control characters")
        return user

    @model_validator(mode="after")
    def _no_field_waits_for_another(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise _fault("stream_options", "has no effect without stream")
        if self.xtc_threshold is not None and self.xtc_probability is None:
            raise _fault("xtc_threshold", "has no effect without xtc_probability")
        return self

    @property
    def limit_field(self) -> str:
        """What the client calls the most tokens of an answer."""
        return "max_tokens"

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer, where the client says."""
        return self.max_tokens

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


_OF_ONE_ROLE = {
    "reasoning_content": "assistant",
    "tool_calls": "assistant",
    "tool_call_id": "tool",
}
"""Fields of a message that chat templates look at in one kind of turn alone."""


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
        for field, role in _OF_ONE_ROLE.items():
            if getattr(self, field) is not None and self.role != role:
                raise _fault(field, f"has no effect in a turn of the {self.role}")
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

    prompt_field = "messages"

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
            raise _fault("top_logprobs", "has no effect without logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and self.max_tokens != self.max_completion_tokens:
            raise _fault("max_completion_tokens", "is max_tokens by another name: give one of them")
        return self

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt_field = "prompt"

    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=20)

    # Taken at the value that needs no doing.
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
