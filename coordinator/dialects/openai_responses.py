"""`/v1/responses`: the fields of its bodies, their translation, stored responses, and the format of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.answers.choice import ID_LENGTH, AnswerEvent, ChoiceEnd, GeneratedAnswer, chat_answer, new_id
from coordinator.answers.delivery import AnswerStatus, PreparedAnswer, StoredWriter, sse_event
from coordinator.answers.journal import Record
from coordinator.answers.stored_answers import owner_of, pin_request, serve_answer, stored_of
from coordinator.dialects import openai_schemas
from coordinator.dialects.openai_schemas import SamplingBody
from coordinator.prompts import request_settings
from coordinator.prompts.conversation import (
    FREEFORM,
    Call,
    RoleName,
    Turn,
    freeform_input,
    freeform_tool,
    joined,
    note_of,
    role_of,
    template_tool,
)
from coordinator.prompts.image_parts import Contents, ResultContents, images_of, text_of
from coordinator.prompts.message_fields import History, HistoryObject, Many, TokenLimit, aliased
from coordinator.schedule.request import GenerationRequest
from coordinator.text.answer_reader import CallArguments, CallEnd, CallStart, Content, Reasoning
from coordinator.text.grammars import ANY_OBJECT, OutputFormat
from coordinator.text.schemas import Json
from coordinator.web.context import Api
from coordinator.web.error_responses import error_body, field_error, refused_field
from coordinator.web.request_body import Body, read_body
from proto.errors import RequestError


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None


class CustomTool(Body):
    """A tool whose input is any text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: Json | None = None


class LeftOutTool(Body):
    """A tool that agents offer by default, a hint: this server has no search, and clients run no shell for it."""

    type: Literal[
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "local_shell",
        "shell",
        "apply_patch",
        "tool_search",
        "image_generation",
    ]


class NamespaceTool(Body):
    """Functions under a common name. The model sees each as NAMESPACE.FUNCTION."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Many[Annotated[Tool | CustomTool | LeftOutTool, Field(discriminator="type")]]


def full_name(namespace: str | None, name: str) -> str:
    """Return the name of a function as the model sees it."""
    return f"{namespace}.{name}" if namespace else name


class NamedTool(openai_schemas.NamedTool):
    """The choice of one tool, perhaps in a namespace."""

    namespace: str | None = None


class TextFormat(Body):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Json | None = Field(None, alias="schema")


class ResponsesBody(SamplingBody):
    """The body of `POST /v1/responses`."""

    model: str | None = None
    input: str | History[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    tools: Many[Annotated[Tool | CustomTool | NamespaceTool | LeftOutTool, Field(discriminator="type")]] | None = None
    tool_choice: (
        Literal["auto", "none", "required"]
        | Annotated[NamedTool | openai_schemas.AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: TokenLimit | None = aliased("max_output_tokens", "max_completion_tokens", "max_tokens")
    reasoning_effort: request_settings.ReasoningEffort | None = aliased("reasoning_effort", "reasoning.effort")
    text_format: TextFormat | None = aliased("text_format", "text.format")
    metadata: Json | None = None
    """Repeated in the response, without effect."""

    @model_validator(mode="after")
    def _fields_agree(self) -> ResponsesBody:
        if self.background and self.store is False:
            raise field_error("background", "requires a stored response. Omit store.")
        return self

    @property
    def functions(self) -> dict[str, tuple[str | None, Tool | CustomTool]]:
        """The functions and custom tools with their namespaces, by the names that the model sees."""
        found: dict[str, tuple[str | None, Tool | CustomTool]] = {}
        for tool in self.tools or ():
            namespace = tool.name if isinstance(tool, NamespaceTool) else None
            members = tool.tools if isinstance(tool, NamespaceTool) else [tool]
            for each in members:
                if isinstance(each, Tool | CustomTool):
                    found[full_name(namespace, each.name)] = (namespace, each)
        return found

    @property
    def items(self) -> list[Item]:
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input or []

    @property
    def output(self) -> OutputFormat | None:
        found = self.text_format
        if found is None or found.type == "text":
            return None
        schema: Any = ANY_OBJECT if found.schema_ is None else found.schema_
        return OutputFormat("json_schema", schema, "text.format.schema")


class MessageItem(HistoryObject):
    """A message. Items that the server sent may be sent back."""

    type: Literal["message"] = "message"
    role: RoleName
    content: Contents = None


class CallItem(HistoryObject):
    """A tool call of an earlier answer."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str | None = None
    name: str
    arguments: Any = None
    input: str | None = None
    namespace: str | None = None

    def call(self) -> Call:
        """Return the call."""
        arguments = self.arguments if self.input is None else {FREEFORM: self.input}
        return Call(self.call_id or "", full_name(self.namespace, self.name), arguments)


class CallOutputItem(HistoryObject):
    """The output of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    output: ResultContents = None


class ReasoningItem(HistoryObject):
    """The reasoning of an earlier answer. Encrypted reasoning of another model is ignored."""

    type: Literal["reasoning"]
    content: Contents = None


class ReferenceItem(HistoryObject):
    """A reference to an output item of a stored response. Clients send it instead of the item."""

    type: Literal["item_reference"] = "item_reference"
    id: str


_KINDS = {
    "message": "message",
    "function_call": "call",
    "custom_tool_call": "call",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "reasoning": "reasoning",
    "item_reference": "reference",
}


def _tag(item: Any) -> str:
    kind = getattr(item, "type", "")
    if isinstance(item, dict):
        kind = item.get("type", "message" if "role" in item else "item_reference")
    return _KINDS.get(kind, "other") if isinstance(kind, str) else "other"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("call")]
    | Annotated[CallOutputItem, Tag("output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("reference")]
    | Annotated[Json, Tag("other")],
    Discriminator(_tag),
]
"""An item of the history. One of another server's tools is a line of text, or nothing."""


def turns_of(instructions: str | None, items: Sequence[Item]) -> list[Turn]:
    """Return the conversation. Consecutive items of the assistant become one message."""
    found = [Turn("system", instructions)] if instructions else []
    own = [turn for item in items if (turn := _turn(item)) is not None]
    for role, group in groupby(own, key=lambda turn: turn.role):
        turns = [*group]
        found += [joined(turns)] if role == "assistant" else turns
    return found


def _turn(item: Item) -> Turn | None:
    match item:
        case MessageItem():
            images = images_of(item.content)
            return Turn(role_of(item.role), text_of(item.content), images=images)
        case CallItem():
            return Turn("assistant", calls=(item.call(),))
        case CallOutputItem():
            images = images_of(item.output)
            return Turn("tool", text_of(item.output), images=images, call_id=item.call_id)
        case ReasoningItem():
            return Turn("assistant", reasoning=text_of(item.content))
        case ReferenceItem():
            return None
    note = note_of(item)
    return Turn("assistant", note) if note else None


router = APIRouter()

_items: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Generate a response."""
    return await serve_answer(request, "responses", prepare)


@router.get("/v1/responses/{response_id}")
async def retrieve_response(
    request: Request,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """Return a stored response, or its events after number `starting_after` and those to come."""
    if stream:
        return await stored_of(request).stream(request, response_id, starting_after)
    if starting_after >= 0:
        raise refused_field("starting_after", "requires stream=true. Add it.")
    record, _ = await stored_of(request).find(request, response_id)
    return JSONResponse(record.result)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a response in the background."""
    return JSONResponse(await stored_of(request).cancel(request, response_id))


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response."""
    await stored_of(request).delete(request, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def prepare(api: Api, request: Request) -> PreparedAnswer:
    """Read the body and render the conversation. Raises RequestError, naming the invalid field."""
    body = await read_body(request, ResponsesBody)
    request_settings.check_model(api, body.model)
    before: list[Json] = []
    if body.previous_response_id is not None:
        before = await _conversation(request, body.previous_response_id)
    own = [await _referenced_item(request, item) if isinstance(item, ReferenceItem) else item for item in body.items]
    items = [*_items.validate_python(before), *own]
    chat = _internal_request(api, body, items)
    answer = await chat_answer(api, chat, new_id("resp_"))
    writer = ResponseWriter(answer, _repeated_fields(body), _names(body))
    if body.store is False:
        return PreparedAnswer(answer, writer, bool(body.stream))
    without_input = body.model_copy(update={"input": "in the history"})
    record = Record(
        id=answer.id,
        owner=owner_of(request),
        model=api.model.fingerprint,
        created=answer.created,
        body=without_input.model_dump_json(exclude_none=True, by_alias=True),
        request=pin_request(answer.choices[0].request),
        history={"before": before, "input": [stored_item(item) for item in own]},
        background=bool(body.background),
    )
    return PreparedAnswer(answer, writer, bool(body.stream), record)


def stored_item(item: Item) -> Json:
    """Return `item` as the history of a record has it, in the client's names."""
    return item if isinstance(item, dict) else item.model_dump(exclude_none=True, by_alias=True)


async def restore(api: Api, record: Record, request: GenerationRequest) -> PreparedAnswer:
    """Read the body of a record again, and continue the engine's request."""
    body = ResponsesBody.model_validate_json(record.body)
    items = _items.validate_python([*record.history["before"], *record.history["input"]])
    chat = _internal_request(api, body, items)
    answer = await chat_answer(api, chat, record.id, restored=request, emitted=record.tokens)
    answer = replace(answer, created=record.created)
    writer = ResponseWriter(answer, _repeated_fields(body), _names(body))
    return PreparedAnswer(answer, writer, stream=True, record=record)


async def _conversation(request: Request, response_id: str) -> list[Json]:
    """Return the items of a stored conversation, the output of the response included."""
    record = await stored_of(request).find_ended(request, response_id, "previous_response_id")
    output: list[Any] = record.result["output"]
    return [*record.history["before"], *record.history["input"], *output]


async def _referenced_item(request: Request, reference: ReferenceItem) -> Item:
    """Return the output item that `reference` names, or a line. Its id begins with the id of its response."""
    number = reference.id.partition("_")[2][:ID_LENGTH]
    output: list[Json] = []
    with suppress(RequestError):  # raised for an unknown response
        output = (await stored_of(request).find_ended(request, f"resp_{number}", "input")).result["output"]
    for item in output:
        if item["id"] == reference.id:
            found: Item = _items.validate_python([item])[0]
            return found
    return {"type": "left out", "text": f"the item {reference.id!r:.80} is not stored here"}


def _for_template(name: str, tool: Tool | CustomTool) -> Json:
    if isinstance(tool, CustomTool):
        return freeform_tool(name, tool.description, tool.format)
    return template_tool(name, tool.description, tool.parameters)


def _internal_request(api: Api, body: ResponsesBody, history: list[Item]) -> request_settings.ChatRequest:
    thinking, budget = request_settings.reasoning_of(body.reasoning_effort)
    offered = [_for_template(name, tool) for name, (_, tool) in body.functions.items()]
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        choice = choice.model_copy(update={"name": full_name(choice.namespace, choice.name)})
    tools, forced = openai_schemas.chosen_tools(choice, offered)
    return request_settings.ChatRequest(
        turns=turns_of(body.instructions, history),
        settings=body.sampling_settings(
            max_tokens=body.max_output_tokens,
            field_names={"prompt": "input", "max_tokens": "max_output_tokens"},
        ),
        tools=tools,
        thinking=thinking,
        reasoning_budget=budget,
        effort=body.reasoning_effort,
        one_call=body.parallel_tool_calls is False,
        forced_tool=forced,
        output=body.output,
    )


def _names(body: ResponsesBody) -> dict[str, Json]:
    """Return the fields of an output item that name a tool, by the name that the model sees, where they are others."""
    found: dict[str, Json] = {}
    for name, (space, tool) in body.functions.items():
        kind = {"type": "custom_tool_call"} if isinstance(tool, CustomTool) else {}
        if space or kind:
            found[name] = {"name": tool.name, **({"namespace": space} if space else {}), **kind}
    return found


def _repeated_fields(body: ResponsesBody) -> Json:
    """Return the fields of a response object that repeat its request."""
    sent = body.model_dump(exclude_none=True, by_alias=True)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": sent.get("metadata", {}),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning_effort, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": sent.get("text_format", {"type": "text"})},
        "tool_choice": sent.get("tool_choice", "auto"),
        "tools": sent.get("tools", []),
        "top_p": body.top_p,
        "truncation": "disabled",
        "background": bool(body.background),
    }


# ---- the format of an answer, whole and streamed

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
CALLS = ("function_call", "custom_tool_call")


@dataclass(eq=False)
class OutputItem:
    """An output item while it is generated. `kind` is its type, `index` its place in the output.

    `text` is the text or the arguments so far. `status` is `incomplete` for an item that the limit cut off, and for a
    call that cannot be parsed. `named` has the fields that name the function of a call.
    """

    kind: str
    index: int
    id: str
    call_id: str
    named: Json
    open: bool = True
    status: str = "in_progress"
    text: str = ""

    def part(self) -> Json | None:
        """Return the content part with the text so far, or None for a tool call."""
        if self.kind == "message":
            return {"type": "output_text", "text": self.text, "annotations": []}
        return {"type": "reasoning_text", "text": self.text} if self.kind == "reasoning" else None

    @property
    def arguments(self) -> Json:
        """The field of a call with what the model wrote. The input of a custom tool is sent when it is whole."""
        if self.kind == "function_call":
            return {"arguments": self.text}
        return {"input": "" if self.open else freeform_input(self.text)}

    def close(self, *, complete: bool) -> None:
        """End the item."""
        self.open = False
        self.status = "completed" if complete else "incomplete"

    def as_json(self) -> Json:
        """Return the item."""
        item: Json = {"id": self.id, "type": self.kind, "status": self.status}
        if self.kind in CALLS:
            return item | {"call_id": self.call_id, **self.named, **self.arguments}
        item["content"] = [] if self.open else [self.part()]
        own: Json = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return item | own


class ResponseWriter(StoredWriter):
    """The writer of `POST /v1/responses`. `fields` repeat the request; `names` has the client's names of functions."""

    def __init__(self, answer: GeneratedAnswer, fields: Json, names: Mapping[str, Json]) -> None:
        super().__init__(answer)
        assert len(answer.choices) == 1
        self._fields = fields
        self._names = names
        self._failure: Json | None = None
        self._items: list[OutputItem] = []
        self._number = 0

    def whole(self) -> Json:
        (choice,) = self._answer.choices
        if choice.reasoning:
            self._add("reasoning").text = "".join(choice.reasoning)
        content = "".join(choice.content)
        if content or not (choice.reasoning or choice.calls):
            self._add("message").text = content
        for call in choice.shown_calls:
            self._add_call(call.id, call.name).text = call.arguments
        for item in self._items:
            item.close(complete=item is not self._items[-1] or self._status() == "completed")
        return self._response(self._status())

    def result(self, status: AnswerStatus) -> Json:
        return self._response(self._status() if status == "ended" else status)

    def opening(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def keep_alive(self, *, queued: bool) -> bytes:
        """Repeat the state of the response, with the number of the newest event: the numbers follow from the tokens."""
        status = "queued" if queued else "in_progress"
        event = {"type": f"response.{status}", "sequence_number": self._number - 1, "response": self._response(status)}
        return sse_event(f"response.{status}", event)

    def closing(self) -> bytes:
        response = self._response(self._status())
        return self._event(f"response.{response['status']}", response=response)

    def error(self, error: Exception) -> bytes:
        details = error_body(error)["error"]
        self._failure = {"code": details["code"] or details["type"], "message": details["message"]}
        return self._event("response.failed", response=self._response("failed"))

    def cancelled(self) -> bytes:
        return self._event("response.cancelled", response=self._response("cancelled"))

    def interrupted(self, error: Exception) -> bytes:
        details = error_body(error)["error"]
        fields = {"code": details["code"], "message": details["message"], "param": None}
        return sse_event("error", {"type": "error", "sequence_number": self._number, **fields})

    def write_event(self, event: AnswerEvent) -> bytes:
        match event.part:
            case Content(text):
                opened, item = self._open("message")
            case Reasoning(text):
                opened, item = self._open("reasoning")
            case CallStart(name):
                assert event.call is not None
                return self._close() + self._added(self._add_call(event.call.id, name))
            case CallArguments(text):
                opened, item = b"", self._items[-1]
                if item.kind == "custom_tool_call":
                    item.text += text
                    return b""
            case CallEnd(complete):
                return self._close(complete=complete)
            case ChoiceEnd(reason):
                return self._close(complete=reason != "length")
        item.text += text
        return opened + self._part_event(item, f"{EVENTS[item.kind]}.delta", delta=text)

    def _open(self, kind: str) -> tuple[bytes, OutputItem]:
        """Return the open item of `kind`, after the events that close the previous item and open this one."""
        if self._items and self._items[-1].open and self._items[-1].kind == kind:
            return b"", self._items[-1]
        closed = self._close()
        item = self._add(kind)
        return closed + self._added(item), item

    def _add_call(self, call_id: str, name: str) -> OutputItem:
        named = {"type": "function_call", **self._names.get(name, {"name": name})}
        return self._add(named.pop("type"), call_id, named)

    def _add(self, kind: str, call_id: str = "", named: Json | None = None) -> OutputItem:
        index = len(self._items)
        item_id = f"{PREFIXES[kind]}_{self._answer.id.partition('_')[2]}{index}"
        item = OutputItem(kind, index, item_id, call_id, named or {})
        self._items.append(item)
        return item

    def _added(self, item: OutputItem) -> bytes:
        place = {"output_index": item.index, "item": item.as_json()}
        added = self._event("response.output_item.added", **place)
        if (part := item.part()) is None:
            return added
        return added + self._part_event(item, "response.content_part.added", part=part)

    def _close(self, *, complete: bool = True) -> bytes:
        if not self._items or not self._items[-1].open:
            return b""
        item = self._items[-1]
        item.close(complete=complete)
        content = b""
        if complete or item.kind not in CALLS:  # arguments that were cut off are never done
            final = {"text": item.text}
            if item.kind in CALLS:
                final = {"name": item.named["name"], **item.arguments}
            if item.kind == "custom_tool_call":
                content = self._part_event(item, f"{EVENTS[item.kind]}.delta", delta=final["input"])
            content += self._part_event(item, f"{EVENTS[item.kind]}.done", **final)
        if (part := item.part()) is not None:
            content += self._part_event(item, "response.content_part.done", part=part)
        place = {"output_index": item.index, "item": item.as_json()}
        return content + self._event("response.output_item.done", **place)

    def _part_event(self, item: OutputItem, name: str, /, **fields: object) -> bytes:
        place: Json = {"item_id": item.id, "output_index": item.index}
        if item.part() is not None:
            place["content_index"] = 0
        return self._event(name, **place, **fields)

    def _event(self, name: str, /, **fields: object) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse_event(name, {"type": name, "sequence_number": number, **fields})

    def _status(self) -> str:
        return "incomplete" if self._answer.choices[0].finish_reason == "length" else "completed"

    def _response(self, status: str) -> Json:
        ended = status in ("completed", "incomplete")
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._answer.id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "error": self._failure,
            "incomplete_details": details,
            "model": self._answer.model,
            "output": [item.as_json() for item in self._items] if ended else [],
            "usage": self._usage() if ended else None,
            **self._fields,
        }

    def _usage(self) -> Json:
        answer = self._answer
        return {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.choices[0].reasoning_tokens},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }
