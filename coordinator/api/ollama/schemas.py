"""The fields of Ollama's request bodies. Unknown fields are rejected by name; hints are in `request.hints`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from coordinator.api.request.body import Body, Many
from coordinator.api.request.errors import field_error
from coordinator.api.request.settings import GenerationSettings
from coordinator.text.model_info import Json
from coordinator.text.output_format import ANY_OBJECT, OutputFormat

RUNNER_OPTIONS = (
    "num_ctx",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "num_keep",
    "numa",
    "low_vram",
    "use_mmap",
    "use_mlock",
    "f16_kv",
)
"""Options of Ollama's own runner. The cluster decides these things when it plans, so they are hints."""

StopString = Annotated[str, Field(min_length=1, max_length=256)]


class Options(Body):
    """Sampling and limits."""

    num_predict: int | None = Field(None, ge=-2)
    temperature: float | None = None
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: list[StopString] | None = Field(None, max_length=64)

    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    num_keep: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    f16_kv: bool | None = None

    # Accepted only at the value that means what this server does.
    repeat_last_n: Literal[-1] | None = None
    mirostat: Literal[0] | None = None
    tfs_z: Literal[1] | None = None
    typical_p: Literal[1] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_is_a_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    def settings(self, prompt_field: str) -> GenerationSettings:
        """Return the settings of the internal request. A negative `num_predict` means no limit of the client."""
        limit = self.num_predict if self.num_predict and self.num_predict > 0 else None
        return GenerationSettings(
            sampling={
                "temperature": self.temperature,
                "top_k": self.top_k,
                "top_p": self.top_p,
                "min_p": self.min_p,
                "repetition_penalty": self.repeat_penalty,
                "presence_penalty": self.presence_penalty,
                "frequency_penalty": self.frequency_penalty,
            },
            seed=self.seed,
            max_tokens=limit,
            stop_strings=self.stop or (),
            field_names={"prompt": prompt_field, "max_tokens": "options.num_predict"},
        )


class ModelBody(Body):
    """The fields that all requests for an answer share."""

    model: str
    stream: bool | None = None
    options: Options | None = None
    keep_alive: str | float | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    format: Literal["", "json"] | Json | None = None

    @field_validator("keep_alive", mode="after")
    @classmethod
    def _model_stays_loaded(cls, value: str | float | None) -> str | float | None:
        if str(value).rstrip("smh") in ("0", "0.0"):
            raise ValueError(
                "0 would unload the model, which this server keeps until it ends. Omit the field."
            )
        return value

    @property
    def output(self) -> OutputFormat | None:
        """The format of the content."""
        if not self.format:
            return None
        schema = ANY_OBJECT if self.format == "json" else self.format
        return OutputFormat("json_schema", schema, "format")

    def settings(self, prompt_field: str) -> GenerationSettings:
        """Return the settings of the internal request."""
        return (self.options or Options.model_validate({})).settings(prompt_field)

    def hints(self) -> Iterator[str]:
        """Yield the hints that the body holds."""
        for name in RUNNER_OPTIONS:
            if self.options and getattr(self.options, name) is not None:
                yield f"options.{name}"


class CallFunction(Body):
    """The function and the arguments of a call in the history."""

    name: str
    arguments: Json
    index: int | None = None
    description: str | None = None


class MessageCall(Body):
    """A call in the history."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CallFunction


class Message(Body):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Many[MessageCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def for_template(self) -> Json:
        """Return the message as chat templates read it."""
        turn: Json = {"role": self.role, "content": self.content or ""}
        if self.thinking:
            turn["reasoning_content"] = self.thinking
        if self.tool_name:
            turn["name"] = self.tool_name
        if self.tool_call_id:
            turn["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id or str(number),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for number, call in enumerate(self.tool_calls)
            ]
        return turn


class Tool(Body):
    """A tool that the model may call. Its function goes to the chat template unchanged."""

    type: Literal["function"] | None = None
    function: Json

    @field_validator("function", mode="after")
    @classmethod
    def _function_has_a_name(cls, function: Json) -> Json:
        if not isinstance(function.get("name"), str):
            raise field_error("name", "required, as a string")
        return function


class ChatBody(ModelBody):
    """The body of `POST /api/chat`. Without messages it only asks whether the model is loaded."""

    messages: Many[Message] | None = None
    tools: Many[Tool] | None = None


class GenerateBody(ModelBody):
    """The body of `POST /api/generate`. Without a prompt it only asks whether the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    # Accepted only without content.
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: Annotated[list[int], Field(max_length=0)] | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None


class ShowBody(Body):
    """The body of `POST /api/show`. Older clients send `name`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
