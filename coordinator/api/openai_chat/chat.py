"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.answer.delivery import PreparedAnswer
from coordinator.api.answer.generated_answer import RestoredAnswer, chat_answer, new_id
from coordinator.api.openai_chat.chat_writer import ChatWriter
from coordinator.api.openai_chat.schemas import ChatBody, Message
from coordinator.api.openai_chat.stored_chats import DIALECT, LAST_EVENT_ID, continue_stream
from coordinator.api.request.body import read_body
from coordinator.api.request.chat import ChatRequest, call_message
from coordinator.api.request.context import Api
from coordinator.api.request.reasoning import reasoning_of
from coordinator.api.request.settings import check_model
from coordinator.api.stored.serving import new_record, serve_storable
from coordinator.journal.record import Record
from coordinator.text.model_info import Json

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Generate the next message of a conversation.

    A client that lost a stored stream repeats its request with `Last-Event-ID` and receives the rest.
    """
    if LAST_EVENT_ID in request.headers:
        return await continue_stream(request)
    return await serve_storable(request, DIALECT, prepare)


async def prepare(api: Api, request: Request) -> PreparedAnswer:
    """Read the body and render the conversation. Raises RequestError, naming the invalid field."""
    body = await read_body(request, ChatBody)
    check_model(api, body.model)
    for hint in body.hints():
        api.hints.report_hint(hint)
    answer = await chat_answer(api, internal_request(api, body), new_id("chatcmpl-"))
    writer = ChatWriter(answer, api.tokenizer, body.stream_options)
    record = new_record(request, DIALECT, answer, body) if body.store else None
    return PreparedAnswer(answer, writer, bool(body.stream), record)


async def restore(api: Api, record: Record, restored: RestoredAnswer) -> PreparedAnswer:
    """Read the body of a record again. See `Restore`."""
    body = ChatBody.model_validate_json(record.body)
    answer = await chat_answer(api, internal_request(api, body), record.id, restored)
    writer = ChatWriter(answer, api.tokenizer, body.stream_options)
    return PreparedAnswer(answer, writer, stream=True)


def internal_request(api: Api, body: ChatBody) -> ChatRequest:
    """Translate a body to the internal request."""
    thinking, budget = reasoning_of(body.reasoning_effort)
    tools = [tool.for_template() for tool in body.tools or ()]
    return ChatRequest(
        messages=[
            template_message(message, api.tokenizer.tool_markers) for message in body.messages
        ],
        settings=body.settings(),
        tools=[] if body.tool_choice == "none" else tools,
        template_kwargs=body.chat_template_kwargs or {},
        thinking=thinking,
        reasoning_budget=budget,
        one_call=body.parallel_tool_calls is False,
        forced_tool=body.forced_tool,
        output=body.output,
        user=body.user,
    )


def template_message(message: Message, markers: tuple[str, str]) -> Json:
    """Return a message as chat templates read it: no nulls, `system` for `developer`, arguments as objects."""
    turn: Json = {"role": "system" if message.role == "developer" else message.role}
    turn["content"] = message.content or ""
    if message.tool_calls is not None:
        calls = [(c.id or "", c.function.name, c.function.arguments) for c in message.tool_calls]
        turn |= call_message(turn["content"], calls, markers)
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    return turn
