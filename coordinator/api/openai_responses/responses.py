"""`POST /v1/responses`, and the stored responses under `/v1/responses/{id}`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fastapi import APIRouter
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.answer.delivery import PreparedAnswer
from coordinator.api.answer.generated_answer import ID_LENGTH, RestoredAnswer, chat_answer, new_id
from coordinator.api.openai_responses.items import Item, ReferenceItem, template_messages
from coordinator.api.openai_responses.response_writer import ResponseWriter
from coordinator.api.openai_responses.schemas import ResponsesBody
from coordinator.api.request.body import read_body
from coordinator.api.request.chat import ChatRequest
from coordinator.api.request.context import Api
from coordinator.api.request.query import number_in_query
from coordinator.api.request.reasoning import reasoning_of
from coordinator.api.request.settings import check_model
from coordinator.api.stored.serving import new_record, serve_storable
from coordinator.api.stored.stored_answer import StoredAnswer
from coordinator.api.stored.stored_answers import stored_of
from coordinator.journal.record import Record
from coordinator.text.model_info import Json
from proto.errors import RequestError

DIALECT = "responses"

PAGE_ITEMS = 20
MAX_PAGE_ITEMS = 100
"""Input items per page, by default and at most, as at OpenAI."""

router = APIRouter()

_items: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Generate a response."""
    return await serve_storable(request, DIALECT, prepare)


@router.get("/v1/responses/{response_id}")
async def retrieve_response(request: Request, response_id: str) -> Response:
    """Return a stored response, or its events after number `starting_after` and those to come."""
    after = number_in_query(request, "starting_after", -1)
    if request.query_params.get("stream") == "true":
        return await stored_of(request).stream(request, response_id, DIALECT, after)
    if after >= 0:
        raise RequestError("starting_after: requires stream=true. Add it.", param="starting_after")
    return JSONResponse(await stored_of(request).result(request, response_id, DIALECT))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a response in the background."""
    return JSONResponse(await stored_of(request).cancel(request, response_id, DIALECT))


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response."""
    await stored_of(request).delete(request, response_id, DIALECT)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """List the input items of a stored response, the newest first unless `order` is `asc`."""
    found = await stored_of(request).find(request, response_id, DIALECT)
    record = found.record if isinstance(found, StoredAnswer) else found
    items = [
        {"id": f"in_{response_id[5:]}{number}", **item}
        for number, item in enumerate(record.history["input"])
    ]
    if request.query_params.get("order", "desc") == "desc":
        items.reverse()
    if (after := request.query_params.get("after")) is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError(f"after: no item has the id {after!r:.80}", param="after")
        items = items[places[0] + 1 :]
    limit = min(MAX_PAGE_ITEMS, max(1, number_in_query(request, "limit", PAGE_ITEMS)))
    page, more = items[:limit], len(items) > limit
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    ends = {"first_id": first, "last_id": last, "has_more": more}
    return JSONResponse({"object": "list", "data": page, **ends})


async def prepare(api: Api, request: Request) -> PreparedAnswer:
    """Read the body and render the conversation. Raises RequestError, naming the invalid field."""
    body = await read_body(request, ResponsesBody)
    check_model(api, body.model)
    for hint in body.hints():
        api.hints.report_hint(hint)
    before: list[Json] = []
    if body.previous_response_id is not None:
        before = await _conversation(request, body.previous_response_id)
    own = [
        await _referenced_item(request, item) if isinstance(item, ReferenceItem) else item
        for item in body.items
    ]
    items = [*_items.validate_python(before), *own]
    answer = await chat_answer(api, _internal_request(api, body, items), new_id("resp_"))
    record = None
    if body.store is not False:
        record = new_record(
            request,
            DIALECT,
            answer,
            body,
            history={
                "before": before,
                "input": [item.model_dump(exclude_none=True) for item in own],
            },
            background=bool(body.background),
        )
    writer = ResponseWriter(answer, _repeated_fields(body))
    return PreparedAnswer(answer, writer, bool(body.stream), record)


async def restore(api: Api, record: Record, restored: RestoredAnswer) -> PreparedAnswer:
    """Read the body of a record again. See `Restore`."""
    body = ResponsesBody.model_validate_json(record.body)
    items = _items.validate_python([*record.history["before"], *record.history["input"]])
    answer = await chat_answer(api, _internal_request(api, body, items), record.id, restored)
    return PreparedAnswer(answer, ResponseWriter(answer, _repeated_fields(body)), stream=True)


async def _conversation(request: Request, response_id: str) -> list[Json]:
    """Return the items of a stored conversation, the output of the response included."""
    param = "previous_response_id"
    record = await stored_of(request).find(request, response_id, DIALECT, param)
    if isinstance(record, StoredAnswer):
        raise RequestError(
            f"{param}: {response_id!r:.80} is in progress. Wait for its end.", param=param
        )
    output: list[Any] = record.result["output"]
    return [*record.history["before"], *record.history["input"], *output]


async def _referenced_item(request: Request, reference: ReferenceItem) -> Item:
    """Return the output item that `reference` names. Its id begins with the id of its response."""
    number = reference.id.partition("_")[2][:ID_LENGTH]
    output: list[Json] = []
    with suppress(RequestError):  # raised for an unknown response
        record = await stored_of(request).find(request, f"resp_{number}", DIALECT)
        output = [] if isinstance(record, StoredAnswer) else record.result["output"]
    for item in output:
        if item["id"] == reference.id:
            found: Item = _items.validate_python([item])[0]
            return found
    raise RequestError(f"input: no stored item has the id {reference.id!r:.80}", param="input")


def _internal_request(api: Api, body: ResponsesBody, history: list[Item]) -> ChatRequest:
    thinking, budget = reasoning_of(body.reasoning.effort if body.reasoning else None)
    tools = [tool.for_template() for tool in body.functions]
    return ChatRequest(
        messages=template_messages(body.instructions, history, api.tokenizer.tool_markers),
        settings=body.settings(),
        tools=[] if body.tool_choice == "none" else tools,
        thinking=thinking,
        reasoning_budget=budget,
        one_call=body.parallel_tool_calls is False,
        forced_tool=body.forced_tool,
        output=body.output,
        user=body.user,
    )


def _repeated_fields(body: ResponsesBody) -> Json:
    """Return the fields of a response object that repeat its request."""
    sent = body.model_dump(exclude_none=True, by_alias=True)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": sent.get("metadata", {}),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **sent.get("reasoning", {})},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}, **sent.get("text", {})},
        "tool_choice": sent.get("tool_choice", "auto"),
        "tools": sent.get("tools", []),
        "top_p": body.top_p,
        "truncation": "disabled",
        "background": bool(body.background),
    }
