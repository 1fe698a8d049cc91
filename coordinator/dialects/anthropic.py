"""`POST /v1/messages` and `/v1/messages/count_tokens` of Anthropic's API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.answers.choice import AnswerEvent, GeneratedAnswer, GeneratedCall, chat_answer, new_id
from coordinator.answers.delivery import AnswerWriter, PreparedAnswer, sse_event
from coordinator.answers.stored_answers import serve_answer
from coordinator.dialects.openai_schemas import SamplingBody
from coordinator.prompts import request_settings
from coordinator.prompts.conversation import Call, RoleName, Turn, role_of, template_tool
from coordinator.prompts.image_parts import ContentPart, Contents, ResultContents, images_of, listed, prompt_of, text_of
from coordinator.prompts.message_fields import History, HistoryObject, Many, aliased
from coordinator.text.answer_reader import CallArguments, CallStart, Content, Reasoning
from coordinator.text.grammars import OutputFormat
from coordinator.text.schemas import Json
from coordinator.text.tokenizer import ContextLengthError
from coordinator.web.context import Api, api_of
from coordinator.web.error_responses import field_error, message_of, status_of
from coordinator.web.request_body import Body, read_body


class ThinkingBlock(HistoryObject):
    """Reasoning of an earlier answer, sent back. That of another model is encrypted, and omitted."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | None = None


class ToolUseBlock(HistoryObject):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str | None = None
    name: str
    input: Any = None


class ToolResultBlock(HistoryObject):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str | None = None
    content: ResultContents = None
    is_error: bool | None = None


_OWN = {"thinking", "redacted_thinking", "tool_use", "tool_result"}


def _tag(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return str(kind).removeprefix("redacted_") if kind in _OWN else "part"


Block = Annotated[
    Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ContentPart, Tag("part")],
    Discriminator(_tag),
]


class Message(HistoryObject):
    """One message. System messages may stand anywhere."""

    role: RoleName
    content: Annotated[str | Many[Block] | None, BeforeValidator(listed)] = None

    def turns(self) -> Iterator[Turn]:
        """Yield the message as all dialects have it. Each result of a tool is a message of its own."""
        parts: list[Any] = []
        for block in [self.content] if isinstance(self.content, str) else self.content or ():
            if isinstance(block, ToolResultBlock):
                text = f"Error: {text_of(block.content)}" if block.is_error else text_of(block.content)
                yield Turn("tool", text, images=images_of(block.content), call_id=block.tool_use_id)
            else:
                parts.append(block)
        if not parts:
            return
        thoughts = [part.thinking for part in parts if isinstance(part, ThinkingBlock)]
        uses = [part for part in parts if isinstance(part, ToolUseBlock)]
        told = [p for p in parts if not isinstance(p, ThinkingBlock | ToolUseBlock)]
        yield Turn(
            role_of(self.role),
            "".join(text_of(part) if isinstance(part, str) else text_of([part]) for part in told),
            "\n".join(filter(None, thoughts)),
            tuple(Call(use.id or "", use.name, use.input) for use in uses),
            images_of(part for part in told if not isinstance(part, str)),
        )


def _parameters(required: Sequence[str], **properties: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


_TEXT: Json = {"type": "string"}
_EDITS = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": {"type": "integer"},
    "insert_text": _TEXT,
    "view_range": {"type": "array", "items": {"type": "integer"}},
}
KNOWN_TOOLS = {
    "text_editor": _parameters(
        ["command", "path"],
        command={"enum": ["view", "create", "str_replace", "insert", "undo_edit"]},
        **_EDITS,
    ),
    "bash": _parameters([], command=_TEXT, restart={"type": "boolean"}),
    "memory": _parameters(
        ["command"],
        command={"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
        **_EDITS,
        old_path=_TEXT,
        new_path=_TEXT,
    ),
}
"""The schemas of tools that clients of Anthropic run and name by their type."""

SERVER_TOOLS = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "mcp_toolset")
"""Tools that Anthropic's server runs. Its agents offer them, and they are left out of the prompt."""


class Tool(Body):
    """A tool of the client."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: Json | None = None

    @model_validator(mode="after")
    def _type_is_known(self) -> Tool:
        if self.type in (None, "custom"):
            if self.input_schema is None:
                raise field_error("input_schema", "required. Send the schema of the tool's input.")
        elif not self.is_left_out and self.known is None and self.input_schema is None:
            raise field_error("type", f"{self.type!r:.80} is not supported. Send the tool with its own input_schema.")
        return self

    @property
    def is_left_out(self) -> bool:
        """True for a tool that Anthropic's server runs."""
        return (self.type or "").startswith(SERVER_TOOLS)

    @property
    def known(self) -> Json | None:
        """The schema of a tool that its type names."""
        return KNOWN_TOOLS.get(re.sub(r"_\d+$", "", self.type or ""))


class ToolChoice(Body):
    """The tools that the model may call, or must call."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """The switch and the budget of reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0)

    @property
    def is_on(self) -> bool:
        """True if the model reasons."""
        return self.type != "disabled" and self.budget_tokens != 0


class OutputSchema(Body):
    """The schema of an answer's text."""

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class PromptBody(Body):
    """The fields that decide the prompt."""

    model: str | None = None
    messages: History[Message] = Field(min_length=1)
    system: Contents = None
    tools: Many[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = aliased("output_config.effort")
    output_format: OutputSchema | None = aliased("output_format", "output_config.format")

    @model_validator(mode="after")
    def _fields_agree(self) -> PromptBody:
        if role_of(self.messages[-1].role) == "assistant":
            raise field_error("messages", "the last message must have the role user")
        if self.thinking and self.thinking.type == "enabled" and self.thinking.budget_tokens is None:
            raise field_error("thinking", "budget_tokens is required with the type enabled")
        choice = self.tool_choice
        if choice and (choice.type == "tool") != (choice.name is not None):
            raise field_error("tool_choice", "name is required with the type tool, and only then")
        return self

    @property
    def functions(self) -> list[Tool]:
        return [tool for tool in self.tools or () if not tool.is_left_out]

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool that must be called, an empty string for any tool, or None."""
        if self.tool_choice is None or self.tool_choice.type not in ("any", "tool"):
            return None
        return self.tool_choice.name or ""

    @property
    def output(self) -> OutputFormat | None:
        if self.output_format is None:
            return None
        return OutputFormat("json_schema", self.output_format.schema_, "output_config.format.schema")


class MessagesBody(PromptBody, SamplingBody):
    """The body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None


def internal_request(body: PromptBody) -> request_settings.ChatRequest:
    """Translate a body, which may only count tokens. Without `thinking` the model does not reason."""
    settings = request_settings.GenerationSettings()
    if isinstance(body, MessagesBody):
        settings = body.sampling_settings(
            max_tokens=body.max_tokens,
            field_names={"prompt": "messages", "parameters": "input_schema"},
        )
    thinking, choice = body.thinking, body.tool_choice
    budget = None
    if thinking and thinking.is_on:
        budget = thinking.budget_tokens or request_settings.BUDGETS.get(body.effort or "")
    tools = [template_tool(tool.name, tool.description, tool.input_schema or tool.known) for tool in body.functions]
    return request_settings.ChatRequest(
        turns=turns_of(body),
        settings=settings,
        tools=[] if choice and choice.type == "none" else tools,
        thinking=bool(thinking and thinking.is_on),
        reasoning_budget=budget,
        one_call=bool(choice and choice.disable_parallel_tool_use),
        forced_tool=body.forced_tool,
        output=body.output,
    )


def turns_of(body: PromptBody) -> list[Turn]:
    """Return the conversation."""
    blocks = [body.system] if isinstance(body.system, str) else body.system or ()
    own = [block if isinstance(block, str) else [block] for block in blocks]
    system = [Turn("system", text_of(each), images=images_of(each)) for each in own]
    return [*system, *(turn for message in body.messages for turn in message.turns())]


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: Exception) -> Json:
    """Return the error body of Anthropic's API."""
    status = status_of(error)
    usual = "invalid_request_error" if status < 500 else "api_error"
    details = {"type": _TYPES.get(status, usual), "message": _message(error)}
    return {"type": "error", "error": details, "request_id": None}


def _message(error: Exception) -> str:
    """Return the message for the client, in the words on which Anthropic's agents compact a conversation."""
    if not isinstance(error, ContextLengthError):
        return message_of(error)
    if error.max_tokens is None:
        return f"prompt is too long: {error.prompt} tokens > {error.limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt} + {error.max_tokens} > {error.limit}, "
        "decrease input length or `max_tokens` and try again"
    )


def _tool_use(call: GeneratedCall, arguments: Any) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter(AnswerWriter):
    """The writer of `POST /v1/messages`. Parts become blocks, and a whole message omits a call that was cut off."""

    def __init__(self, answer: GeneratedAnswer) -> None:
        super().__init__(answer)
        assert len(answer.choices) == 1
        self._block = -1  # index of the current content block
        self._kind: str | None = None  # type of the open block

    def whole(self) -> Json:
        (choice,) = self._answer.choices
        content: list[Json] = []
        if choice.reasoning:
            thinking = "".join(choice.reasoning)
            content.append({"type": "thinking", "thinking": thinking, "signature": ""})
        if text := "".join(choice.content):
            content.append({"type": "text", "text": text})
        for call in choice.complete_calls:
            content.append(_tool_use(call, json.loads(call.arguments)))
        return {**self._message(content), **self._stop(), "usage": self._usage()}

    def opening(self) -> bytes:
        unfinished = {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return _event("message_start", message={**self._message([]), **unfinished})

    def keep_alive(self, *, queued: bool) -> bytes:
        return _event("ping")

    def closing(self) -> bytes:
        return _event("message_delta", delta=self._stop(), usage=self._usage()) + _event("message_stop")

    def error(self, error: Exception) -> bytes:
        return sse_event("error", anthropic_error(error))

    def write_event(self, event: AnswerEvent) -> bytes:
        match event.part:
            case Content(text):
                opened = self._open({"type": "text", "text": ""})
                delta: Json = {"type": "text_delta", "text": text}
            case Reasoning(text):
                opened = self._open({"type": "thinking", "thinking": "", "signature": ""})
                delta = {"type": "thinking_delta", "thinking": text}
            case CallStart():
                assert event.call is not None
                return self._open(_tool_use(event.call, {}))
            case CallArguments(text):
                opened = b""
                delta = {"type": "input_json_delta", "partial_json": text}
            case _:  # the end of a call or of the choice
                return self._close()
        return opened + _event("content_block_delta", index=self._block, delta=delta)

    def _open(self, block: Json) -> bytes:
        """Return the start of a content block, after the end of the previous one; empty if its type is open."""
        if block["type"] == self._kind:
            return b""
        closed = self._close()
        self._kind = block["type"]
        self._block += 1
        return closed + _event("content_block_start", index=self._block, content_block=block)

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return _event("content_block_stop", index=self._block)

    def _message(self, content: list[Json]) -> Json:
        answer = self._answer
        return {"id": answer.id, "type": "message", "role": "assistant", "model": answer.model, "content": content}

    def _stop(self) -> Json:
        (choice,) = self._answer.choices
        reason = STOP_REASONS[choice.finish_reason or "stop"]
        if choice.stop_string is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": choice.stop_string}

    def _usage(self) -> Json:
        cached = self._answer.cached_tokens
        return {
            "input_tokens": self._answer.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._answer.completion_tokens,
        }


def _event(name: str, /, **fields: object) -> bytes:
    return sse_event(name, {"type": name, **fields})


router = APIRouter()


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    """Generate the next message of a conversation."""
    return await serve_answer(request, "messages", prepare)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a prompt without generating an answer."""
    api = api_of(request)
    body = await read_body(request, PromptBody)
    request_settings.check_model(api, body.model)
    prompt, _ = await prompt_of(api, internal_request(body))
    return JSONResponse({"input_tokens": len(prompt.tokens)})


async def prepare(api: Api, request: Request) -> PreparedAnswer:
    """Read the body and render the conversation. Raises RequestError, naming the invalid field."""
    body = await read_body(request, MessagesBody)
    request_settings.check_model(api, body.model)
    answer = await chat_answer(api, internal_request(body), new_id("msg_"))
    return PreparedAnswer(answer, MessageWriter(answer), stream=bool(body.stream))
