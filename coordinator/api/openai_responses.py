"""`/v1/responses`: the fields of its bodies, their translation, and stored responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api import request_settings
from coordinator.api.choice import ID_LENGTH, chat_answer, new_id
from coordinator.api.context import Api
from coordinator.api.delivery import PreparedAnswer
from coordinator.api.error_responses import field_error, refused_field
from coordinator.api.image_parts import InputImagePart, text_of, with_images
from coordinator.api.journal import Record
from coordinator.api.openai_schemas import SamplingBody
from coordinator.api.request_body import Body, Many, TokenLimit, named, read_body
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


class LeftOutTool(Body):
    """A tool that agents offer by default, a hint: this server has no search, and the model writes only functions."""

    type: Literal[
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "custom",
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
    tools: Many[Annotated[Tool | LeftOutTool, Field(discriminator="type")]]


def full_name(namespace: str | None, name: str) -> str:
    """Return the name of a function as the model sees it."""
    return f"{namespace}.{name}" if namespace else name


class NamedTool(Body):
    """The choice of one tool."""

    type: Literal["function"]
    name: str
    namespace: str | None = None


class TextFormat(Body):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Json | None = Field(None, alias="schema")


class ResponsesBody(SamplingBody):
    """The body of `POST /v1/responses`."""

    model: str | None = None
    input: str | Many[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    tools: (
        Many[Annotated[Tool | NamespaceTool | LeftOutTool, Field(discriminator="type")]] | None
    ) = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: TokenLimit | None = named(
        "max_output_tokens", "max_completion_tokens", "max_tokens"
    )
    reasoning_effort: request_settings.ReasoningEffort | None = named(
        "reasoning_effort", "reasoning.effort"
    )
    text_format: TextFormat | None = named("text_format", "text.format")
    metadata: Json | None = None
    """Repeated in the response, without effect."""

    @model_validator(mode="after")
    def _fields_agree(self) -> ResponsesBody:
        if self.background and self.store is False:
            raise field_error("background", "requires a stored response. Omit store.")
        if not self.input:
            raise field_error("input", "empty. Send a text or at least one item.")
        return self

    @property
    def functions(self) -> dict[str, tuple[str | None, Tool]]:
        """The functions among the tools with their namespaces, by the names that the model sees."""
        found: dict[str, tuple[str | None, Tool]] = {}
        for tool in self.tools or ():
            namespace = tool.name if isinstance(tool, NamespaceTool) else None
            members = tool.tools if isinstance(tool, NamespaceTool) else [tool]
            for each in members:
                if isinstance(each, Tool):
                    found[full_name(namespace, each.name)] = (namespace, each)
        return found

    @property
    def items(self) -> list[Item]:
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool that must be called, an empty string for any tool, or None."""
        if isinstance(self.tool_choice, NamedTool):
            return full_name(self.tool_choice.namespace, self.tool_choice.name)
        return "" if self.tool_choice == "required" else None

    @property
    def output(self) -> OutputFormat | None:
        found = self.text_format
        if found is None or found.type == "text":
            return None
        schema: Any = ANY_OBJECT if found.schema_ is None else found.schema_
        return OutputFormat("json_schema", schema, "text.format.schema")


class TextPart(Body):
    """Text of a message, of reasoning or of a tool's output."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class MessageItem(Body):
    """A message. Items that the server sent may be sent back."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[TextPart | InputImagePart]


class CallItem(Body):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CallOutputItem(Body):
    """The output of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Many[TextPart | InputImagePart]


class ReasoningItem(Body):
    """The reasoning of an earlier answer. Encrypted reasoning of another model is ignored."""

    type: Literal["reasoning"]
    content: Many[TextPart] | None = None


class ReferenceItem(Body):
    """A reference to an output item of a stored response. Clients send it instead of the item."""

    type: Literal["item_reference"]
    id: str


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "")
    return kind if isinstance(kind, str) else ""


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(_kind),
]


def template_messages(
    instructions: str | None, items: Sequence[Item], markers: tuple[str, str]
) -> list[Json]:
    """Return the conversation as chat templates read it. Consecutive items of the assistant become one message."""
    turns: list[Json] = []
    if instructions:
        turns.append({"role": "system", "content": instructions})
    pending: list[Item] = []
    for item in items:
        if isinstance(item, CallItem | ReasoningItem) or getattr(item, "role", "") == "assistant":
            pending.append(item)
            continue
        turns += _assistant(pending, markers)
        pending = []
        if isinstance(item, CallOutputItem):
            output = _text(item.output)
            turn = {"role": "tool", "tool_call_id": item.call_id, "content": output}
            turns.append(with_images(turn, item.output))
        elif isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            turn = with_images({"role": role, "content": _text(item.content)}, item.content)
            if role == "system" and "images" in turn:
                raise refused_field("input", ONLY_USERS)
            turns.append(turn)
    return request_settings.with_system_first([*turns, *_assistant(pending, markers)])


ONLY_USERS = "images are read in messages of the user and in outputs of tools. Move them there."


def _assistant(items: Sequence[Item], markers: tuple[str, str]) -> list[Json]:
    if not items:
        return []
    messages = [item for item in items if isinstance(item, MessageItem)]
    if any(with_images({}, item.content) for item in messages):
        raise refused_field("input", ONLY_USERS)
    text = "".join(_text(item.content) for item in messages)
    calls = [item for item in items if isinstance(item, CallItem)]
    named = [(c.call_id, full_name(c.namespace, c.name), c.arguments) for c in calls]
    turn = request_settings.call_message(text, named, markers)
    thoughts = [_text(i.content or ()) for i in items if isinstance(i, ReasoningItem)]
    if any(thoughts):
        turn["reasoning_content"] = "\n".join(thoughts)
    return [turn]


def _text(content: str | Iterable[TextPart | InputImagePart]) -> str:
    return content if isinstance(content, str) else text_of(content)


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
    own = [
        await _referenced_item(request, item) if isinstance(item, ReferenceItem) else item
        for item in body.items
    ]
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
    return item.model_dump(exclude_none=True, by_alias=True)


async def restore(api: Api, record: Record, request: GenerationRequest) -> PreparedAnswer:
    """Read the body of a record again, and continue the engine's request."""
    body = ResponsesBody.model_validate_json(record.body)
    items = _items.validate_python([*record.history["before"], *record.history["input"]])
    chat = _internal_request(api, body, items)
    answer = await chat_answer(api, chat, record.id, restored=request)
    answer = replace(answer, created=record.created)
    writer = ResponseWriter(answer, _repeated_fields(body), _names(body))
    return PreparedAnswer(answer, writer, stream=True, record=record)


async def _conversation(request: Request, response_id: str) -> list[Json]:
    """Return the items of a stored conversation, the output of the response included."""
    param = "previous_response_id"
    record, running = await stored_of(request).find(request, response_id, param)
    if running is not None:
        raise refused_field(param, f"{response_id!r:.80} is in progress. Wait for its end.")
    output: list[Any] = record.result["output"]
    return [*record.history["before"], *record.history["input"], *output]


async def _referenced_item(request: Request, reference: ReferenceItem) -> Item:
    """Return the output item that `reference` names. Its id begins with the id of its response."""
    number = reference.id.partition("_")[2][:ID_LENGTH]
    output: list[Json] = []
    with suppress(RequestError):  # raised for an unknown response
        record, _ = await stored_of(request).find(request, f"resp_{number}")
        output = record.result["output"]
    for item in output:
        if item["id"] == reference.id:
            found: Item = _items.validate_python([item])[0]
            return found
    raise refused_field("input", f"no stored item has the id {reference.id!r:.80}")


def _internal_request(
    api: Api, body: ResponsesBody, history: list[Item]
) -> request_settings.ChatRequest:
    thinking, budget = request_settings.reasoning_of(body.reasoning_effort)
    found = body.functions.items()
    tools = [
        request_settings.template_tool(name, tool.description, tool.parameters)
        for name, (_, tool) in found
    ]
    return request_settings.ChatRequest(
        messages=template_messages(body.instructions, history, api.tokenizer.tool_markers),
        settings=body.sampling_settings(
            max_tokens=body.max_output_tokens,
            field_names={"prompt": "input", "max_tokens": "max_output_tokens"},
        ),
        tools=[] if body.tool_choice == "none" else tools,
        thinking=thinking,
        reasoning_budget=budget,
        one_call=body.parallel_tool_calls is False,
        forced_tool=body.forced_tool,
        output=body.output,
    )


def _names(body: ResponsesBody) -> dict[str, Json]:
    """Return the fields that name a function of a namespace in an output item, by the name that the model sees."""
    found = ((name, *function) for name, function in body.functions.items())
    return {name: {"name": tool.name, "namespace": space} for name, space, tool in found if space}


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
