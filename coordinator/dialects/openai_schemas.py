"""The fields of OpenAI's request bodies for chat and text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, AliasPath, BeforeValidator, Field, model_validator

from coordinator.prompts.conversation import FREEFORM, Call, RoleName, Turn, freeform_tool, role_of, template_tool
from coordinator.prompts.image_parts import Contents, images_of, text_of
from coordinator.prompts.message_fields import (
    Budget,
    History,
    HistoryObject,
    Many,
    Seed,
    StopString,
    StopStrings,
    TokenLimit,
    aliased,
)
from coordinator.prompts.request_settings import (
    MAX_CHOICES,
    GenerationSettings,
    ReasoningEffort,
    reasoning_of,
)
from coordinator.text.grammars import ANY_OBJECT, OutputFormat
from coordinator.text.schemas import Json
from coordinator.web.error_responses import field_error, refused_field
from coordinator.web.request_body import Body
from proto.errors import RequestError


class ResponseFormat(Body):
    """The format of an answer's content, always enforced. llama.cpp's clients send the schema without `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Json | None = aliased("json_schema.schema", "schema")

    @model_validator(mode="after")
    def _schema_fits_the_type(self) -> ResponseFormat:
        if self.schema_ is None and self.type == "json_schema":
            raise field_error("json_schema", "the type json_schema requires a schema")
        return self

    def output(self) -> OutputFormat | None:
        if self.type == "text":
            return None
        schema: Any = ANY_OBJECT if self.schema_ is None else self.schema_
        return OutputFormat("json_schema", schema, "response_format.json_schema.schema")


class SamplingBody(Body):
    """The fields of sampling that all dialects share."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1, description="0, and -1 as vLLM writes it, mean no limit")
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_penalty: float | None = aliased("repetition_penalty", "repeat_penalty", "rep_pen")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    seed: Seed | None = aliased("seed", "sampler_seed")
    stop: StopString | StopStrings | None = aliased("stop", "stop_sequences", "stopping_strings")

    def sampling_settings(self, **others: Any) -> GenerationSettings:
        """Return the settings of the internal request with these fields and `others`."""
        fields = SamplingBody.model_fields.keys() - {"seed", "stop"}
        return GenerationSettings(
            sampling={name: getattr(self, name) for name in fields},
            seed=self.seed,
            stop_strings=[*filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or ())],
            **others,
        )


class NamedTool(Body):
    """The choice of one tool."""

    type: Literal["function", "custom"]
    name: str = Field(validation_alias=AliasChoices(AliasPath("function", "name"), AliasPath("custom", "name"), "name"))


class AllowedTool(Body):
    """One of some tools. Those that this server leaves out have no name."""

    name: str | None = Field(
        None,
        validation_alias=AliasChoices(AliasPath("function", "name"), AliasPath("custom", "name"), "name"),
    )
    namespace: str | None = None


class AllowedTools(Body):
    """The choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = Field(validation_alias=AliasChoices(AliasPath("allowed_tools", "mode"), "mode"))
    tools: Many[AllowedTool] = Field(
        min_length=1,
        validation_alias=AliasChoices(AliasPath("allowed_tools", "tools"), "tools"),
    )


ToolChoice = Literal["auto", "none", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]


def chosen_tools(choice: Any, tools: Sequence[Json]) -> tuple[list[Json], str | None]:
    """Return the tools that the model may call, and the one it must call, an empty string for any, or None."""
    if choice == "none":
        return [], None
    if isinstance(choice, AllowedTools):
        spaces = [f"{tool.namespace}." if tool.namespace else "" for tool in choice.tools]
        names = {f"{space}{tool.name}" for space, tool in zip(spaces, choice.tools, strict=True)}
        allowed = [tool for tool in tools if tool["function"]["name"] in names]
        if not allowed:
            raise refused_field("tool_choice", "none of its tools is in tools. Send them there.")
        return allowed, "" if choice.mode == "required" else None
    if isinstance(choice, NamedTool):
        return list(tools), choice.name
    return list(tools), "" if choice == "required" else None


class GenerationBody(SamplingBody):
    """The fields that chat completions and completions share."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    include_usage: bool | None = aliased("stream_options.include_usage")
    token_origins: bool | None = aliased("stream_options.token_origins")
    """Our extension: each chunk of a chat has one letter for each of its tokens, `d` for an accepted draft."""
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = aliased("ignore_eos", "ban_eos_token")
    max_tokens: TokenLimit | None = aliased("max_tokens", "n_predict", "num_predict", "max_new_tokens")
    max_completion_tokens: TokenLimit | None = None
    logit_bias: dict[Annotated[int, Field(ge=0, lt=2**31)], float] | None = None
    return_token_ids: bool | None = None
    num_draft_tokens: int | None = Field(None, ge=0)
    response_format: ResponseFormat | None = None
    guided_json: Json | None = aliased("guided_json", "json_schema", "structured_outputs.json")
    guided_regex: str | None = aliased("guided_regex", "structured_outputs.regex")
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = aliased(
        "guided_choice", "structured_outputs.choice"
    )
    structured_outputs: Body | None = None
    """vLLM's object for the three fields above. Its other members are refused."""

    @property
    def output(self) -> OutputFormat | None:
        """The format of the content. Raises RequestError if the client sent several."""
        found = [self.response_format.output() if self.response_format else None]
        if self.guided_json is not None:
            found.append(OutputFormat("json_schema", self.guided_json, "guided_json"))
        if self.guided_regex is not None:
            found.append(OutputFormat("regex", self.guided_regex, "guided_regex"))
        if self.guided_choice is not None:
            found.append(OutputFormat("choice", self.guided_choice, "guided_choice"))
        formats = [each for each in found if each is not None]
        for other in formats[1:]:
            raise RequestError(f"{other.param}: a second format. Send one.", param=other.param)
        return formats[0] if formats else None

    def generation_settings(self, prompt_field: str, logprobs: int | None) -> GenerationSettings:
        """Return the settings of the internal request. `logprobs` is the number of alternatives of each token."""
        return self.sampling_settings(
            logit_bias=self.logit_bias or {},
            n=self.n or 1,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            drafts=self.num_draft_tokens,
            logprobs=logprobs,
            field_names={
                "prompt": prompt_field,
                "parameters": "function.parameters",
                "max_tokens": "max_completion_tokens" if self.max_completion_tokens else "max_tokens",
            },
        )


class MessageToolCall(HistoryObject):
    """A call in the history, of a function or of a custom tool."""

    id: Any = None
    name: str = Field(validation_alias=AliasChoices(AliasPath("function", "name"), AliasPath("custom", "name")))
    arguments: Any = aliased("function.arguments")
    input: str | None = aliased("custom.input")

    def call(self) -> Call:
        """Return the call."""
        arguments = self.arguments if self.input is None else {FREEFORM: self.input}
        return Call(str(self.id or ""), self.name, arguments)


class FunctionCall(HistoryObject):
    """The only call of a message."""

    name: str
    arguments: str | Json | None = None

    def call(self) -> Call:
        """Return the call."""
        return Call("", self.name, self.arguments)


class Message(HistoryObject):
    """One message. Those that OpenAI's client returned may come back with null fields."""

    role: RoleName
    content: Contents = None
    name: str | None = None
    reasoning_content: Any = aliased("reasoning_content", "reasoning", "thinking")
    tool_calls: Many[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    """The call of older clients, which had one."""
    images: Any = None
    """Ollama's field, which would be lost without a word."""

    @model_validator(mode="after")
    def _content_fits_the_role(self) -> Message:
        if self.content is None and role_of(self.role) in ("system", "user"):
            raise ValueError(f"a {self.role} message requires content")
        if self.images:
            raise field_error("images", "not supported here. Send image_url parts.")
        return self

    @property
    def _older_call(self) -> list[FunctionCall]:
        return [] if self.function_call is None else [self.function_call]

    def turn(self) -> Turn:
        """Return the message as all dialects have it."""
        return Turn(
            role_of(self.role),
            text_of(self.content),
            self.reasoning_content if isinstance(self.reasoning_content, str) else "",
            tuple(each.call() for each in [*(self.tool_calls or ()), *self._older_call]),
            images_of(self.content),
            self.tool_call_id,
            self.name,
        )


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(validation_alias=AliasPath("function", "name"))
    description: str | None = aliased("function.description")
    parameters: Json | None = aliased("function.parameters")

    def for_template(self) -> Json:
        """Return the tool as chat templates read it."""
        return template_tool(self.name, self.description, self.parameters)


class CustomTool(Body):
    """A tool whose input is any text."""

    type: Literal["custom"]
    name: str = Field(validation_alias=AliasPath("custom", "name"))
    description: str | None = aliased("custom.description")
    format: Json | None = aliased("custom.format.grammar", "custom.format")

    def for_template(self) -> Json:
        """Return the tool as chat templates read it."""
        return freeform_tool(self.name, self.description, self.format)


Tool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


_SWITCH = {"enabled": True, "adaptive": True, "disabled": False}

Switch = Annotated[bool, BeforeValidator(lambda sent: _SWITCH.get(str(sent), sent))]
"""The switch of the reasoning, also in the words of Anthropic's `thinking.type`."""


SOUNDS_AND_FILMS = {"audio", "audio_url", "input_audio", "video", "video_url", "input_video"}
"""Parts that are refused in the newest message. In earlier ones they become a line that says so."""


class ChatBody(GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    messages: History[Message] = Field(min_length=1)
    tools: Many[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None
    reasoning_effort: ReasoningEffort | None = aliased("reasoning_effort", "reasoning.effort")
    enable_thinking: Switch | None = aliased("enable_thinking", "thinking.type", "reasoning.enabled")
    thinking_budget: Budget | None = aliased(
        "thinking_budget", "thinking_token_budget", "thinking.budget_tokens", "reasoning.max_tokens"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatBody:
        newest = self.messages[-1]
        sent = newest.content if role_of(newest.role) == "user" else ()
        for part in sent if isinstance(sent, list) else ():
            if isinstance(part, dict) and (kind := str(part.get("type"))) in SOUNDS_AND_FILMS:
                raise field_error("messages", f"a part of type {kind} is not read. Send text.")
        if self.continue_final_message and role_of(self.messages[-1].role) != "assistant":
            raise field_error("continue_final_message", "requires a last message of the assistant")
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise field_error("add_generation_prompt", "false requires continue_final_message")
        return self

    @property
    def thinking(self) -> tuple[bool | None, int | None]:
        """Switch of the reasoning, None for the default of the template, and the maximum number of reasoning tokens."""
        thinking, budget = reasoning_of(self.reasoning_effort)
        switch = self.enable_thinking if thinking is None else thinking
        if self.thinking_budget is None:
            return switch, budget
        return switch if self.thinking_budget else False, self.thinking_budget


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt: str | Many[str] | Many[int] | Many[list[int]]
    suffix: str | None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionBody:
        if self.prompt == []:
            raise field_error("prompt", "the list is empty. Send at least one prompt.")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [token for token in self.prompt if isinstance(token, int)]
        return [tokens] if tokens else [p for p in self.prompt if not isinstance(p, int)]
