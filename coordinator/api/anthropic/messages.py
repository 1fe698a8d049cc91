"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.answer.delivery import PreparedAnswer, serve_answer
from coordinator.api.answer.generated_answer import chat_answer, new_id
from coordinator.api.anthropic.conversation import internal_request
from coordinator.api.anthropic.message_writer import MessageWriter
from coordinator.api.anthropic.schemas import CountBody, MessagesBody, PromptBody
from coordinator.api.request.body import read_body
from coordinator.api.request.chat import ChatRequest, render_chat
from coordinator.api.request.context import Api, api_of
from coordinator.api.request.settings import check_model

router = APIRouter()


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    """Generate the next message of a conversation."""
    return await serve_answer(request, "messages", prepare)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a prompt without generating an answer."""
    api = api_of(request)
    chat = _read(api, await read_body(request, CountBody))
    prompt = await render_chat(api, chat)
    return JSONResponse({"input_tokens": len(prompt.tokens)})


async def prepare(api: Api, request: Request) -> PreparedAnswer:
    """Read the body and render the conversation. Raises RequestError, naming the invalid field."""
    body = await read_body(request, MessagesBody)
    answer = await chat_answer(api, _read(api, body), new_id("msg_"))
    return PreparedAnswer(answer, MessageWriter(answer), stream=bool(body.stream))


def _read(api: Api, body: PromptBody) -> ChatRequest:
    check_model(api, body.model)
    for hint in body.hints():
        api.hints.report_hint(hint)
    return internal_request(body)
