"""`/v1/responses`: the fields of its bodies, their translation, and stored responses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api import openai_schemas, request_settings
from coordinator.api.choice import ID_LENGTH, chat_answer, new_id
from coordinator.api.context import Api
from coordinator.api.conversation import (
    FREEFORM,
    Call,
    RoleName,
    Turn,
    freeform_tool,
    joined,
    note_of,
    role_of,
    template_tool,
)
from coordinator.api.delivery import PreparedAnswer
from coordinator.api.error_responses import field_error, refused_field
from coordinator.api.image_parts import Contents, ResultContents, images_of, text_of
from coordinator.api.journal import Record
from coordinator.api.openai_schemas import SamplingBody
from coordinator.api.request_body import Body, History, Many, TokenLimit, Told, named, read_body
from coordinator.api.responses_writer import ResponseWriter
from coordinator.api.stored_answers import owner_of, pin_request, serve_answer, stored_of
from coordinator.schedule.request import GenerationRequest
from coordinator.text.grammars import ANY_OBJECT, OutputFormat
from coordinator.text.schemas import Json
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
    max_output_tokens: TokenLimit | None = named("max_output_tokens", "max_completion_tokens", "max_tokens")
    reasoning_effort: request_settings.ReasoningEffort | None = named("reasoning_effort", "reasoning.effort")
    text_format: TextFormat | None = named("text_format", "text.format")
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


class MessageItem(Told):
    """A message. Items that the server sent may be sent back."""

    type: Literal["message"] = "message"
    role: RoleName
    content: Contents = None


class CallItem(Told):
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


class CallOutputItem(Told):
    """The output of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    output: ResultContents = None


class ReasoningItem(Told):
    """The reasoning of an earlier answer. Encrypted reasoning of another model is ignored."""

    type: Literal["reasoning"]
    content: Contents = None


class ReferenceItem(Told):
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
