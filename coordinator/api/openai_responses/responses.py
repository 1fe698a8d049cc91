"""`POST /v1/responses`, and the stored responses under `/v1/responses/{id}`."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.answer.delivery import PreparedAnswer, serve_answer
from coordinator.api.answer.generated_answer import chat_answer, new_id
from coordinator.api.openai_responses.items import Item, template_messages
from coordinator.api.openai_responses.response_writer import ResponseWriter
from coordinator.api.openai_responses.schemas import ResponsesBody
from coordinator.api.openai_responses.store import ResponseStore, StoredResponse
from coordinator.api.request.body import read_body
from coordinator.api.request.chat import ChatRequest
from coordinator.api.request.context import Api
from coordinator.api.request.reasoning import reasoning_of
from coordinator.api.request.settings import check_model
from coordinator.text.model_info import Json
from proto.errors import RequestError

router = APIRouter()

_items: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Generate a response."""
    return await serve_answer(request, "responses", prepare)


@router.get("/v1/responses/{response_id}")
async def retrieve_response(request: Request, response_id: str) -> Response:
    """Return a stored response."""
    if request.query_params.get("stream") == "true":
        raise RequestError("stream: a stored response cannot be streamed. Omit it.", param="stream")
    return JSONResponse(_store_of(request).find_response(response_id).response)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response."""
    _store_of(request).delete_response(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """List the input items of a stored response."""
    items = list(_store_of(request).find_response(response_id).input_items)
    if request.query_params.get("order", "desc") == "desc":
        items.reverse()
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    page = {"first_id": first, "last_id": last, "has_more": False}
    return JSONResponse({"object": "list", "data": items, **page})


async def prepare(api: Api, request: Request) -> PreparedAnswer:
    """Read the body and render the conversation. Raises RequestError, naming the invalid field."""
    body = await read_body(request, ResponsesBody)
    check_model(api, body.model)
    for hint in body.hints():
        api.hints.report_hint(hint)
    store = _store_of(request)
    history = list(body.items)
    if body.previous_response_id is not None:
        before = store.find_response(body.previous_response_id, "previous_response_id")
        history = [*before.history, *history]
    answer_id = new_id("resp_")
    answer = await chat_answer(api, _internal_request(api, body, history), answer_id)

    def keep(response: Json) -> None:
        """Store the response unless the client declined it."""
        if body.store is False:
            return
        inputs = [
            {"id": f"in_{answer_id[5:]}{number}", **item.model_dump(exclude_none=True)}
            for number, item in enumerate(body.items)
        ]
        output = _items.validate_python(response["output"])
        store.add_response(StoredResponse(response, inputs, [*history, *output]))

    writer = ResponseWriter(answer, _repeated_fields(body), keep)
    return PreparedAnswer(answer, writer, stream=bool(body.stream))


def _internal_request(api: Api, body: ResponsesBody, history: list[Item]) -> ChatRequest:
    thinking, budget = reasoning_of(body.reasoning.effort if body.reasoning else None)
    tools = [tool.for_template() for tool in body.tools or ()]
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
        "background": False,
    }


def _store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.response_store
    return store
