"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.answer.delivery import PreparedAnswer, serve_answer
from coordinator.api.answer.generated_answer import (
    GeneratedAnswer,
    chat_answer,
    new_id,
    text_answer,
)
from coordinator.api.ollama.line_writer import LineWriter
from coordinator.api.ollama.names import check_name
from coordinator.api.ollama.schemas import ChatBody, GenerateBody, ModelBody
from coordinator.api.ollama.timestamp import utc_now
from coordinator.api.request.body import read_body
from coordinator.api.request.chat import ChatRequest
from coordinator.api.request.context import Api, api_of
from coordinator.api.request.reasoning import reasoning_of
from coordinator.text.model_info import Json

router = APIRouter()


@router.post("/api/chat")
async def chat(request: Request) -> Response:
    """Generate the next message of a conversation."""
    body = await read_body(request, ChatBody)
    api = api_of(request)
    _check(api, body)
    if not body.messages:
        return JSONResponse(_loaded(api, {"message": {"role": "assistant", "content": ""}}))

    async def prepare(api: Api, request: Request) -> PreparedAnswer:
        """Render the conversation. Raises RequestError, naming the invalid field."""
        messages = [message.for_template() for message in body.messages or ()]
        tools = [{"type": "function", "function": tool.function} for tool in body.tools or ()]
        answer = await _chat_answer(api, body, messages, tools, prompt_field="messages")
        return _prepared(answer, body, flat=False)

    return await serve_answer(request, "ollama_chat", prepare)


@router.post("/api/generate")
async def generate(request: Request) -> Response:
    """Generate the answer to a prompt, or with `raw` the continuation of a text."""
    body = await read_body(request, GenerateBody)
    api = api_of(request)
    _check(api, body)
    if not body.prompt:
        return JSONResponse(_loaded(api, {"response": ""}))

    async def prepare(api: Api, request: Request) -> PreparedAnswer:
        """Tokenize the prompt. Raises RequestError, naming the invalid field."""
        if body.raw:
            text = body.prompt or ""
            tokens = await api.large_work.run(len(text), partial(api.tokenizer.encode, text))
            answer = await text_answer(
                api, body.settings("prompt"), [tokens], new_id("gen-"), output=body.output
            )
        else:
            messages: list[Json] = []
            if body.system:
                messages.append({"role": "system", "content": body.system})
            messages.append({"role": "user", "content": body.prompt})
            answer = await _chat_answer(api, body, messages, [], prompt_field="prompt")
        return _prepared(answer, body, flat=True)

    return await serve_answer(request, "ollama_generate", prepare)


async def _chat_answer(
    api: Api, body: ModelBody, messages: list[Json], tools: list[Json], *, prompt_field: str
) -> GeneratedAnswer:
    if isinstance(body.think, str):
        thinking, budget = reasoning_of(body.think)
    else:
        thinking, budget = body.think, None
    chat = ChatRequest(
        messages=messages,
        settings=body.settings(prompt_field),
        tools=tools,
        thinking=thinking,
        reasoning_budget=budget,
        output=body.output,
    )
    return await chat_answer(api, chat, new_id("chat-"))


def _prepared(answer: GeneratedAnswer, body: ModelBody, *, flat: bool) -> PreparedAnswer:
    """Return the answer with its writer. Ollama streams unless the client switches it off."""
    return PreparedAnswer(answer, LineWriter(answer, flat=flat), stream=body.stream is not False)


def _check(api: Api, body: ModelBody) -> None:
    check_name(api, body.model)
    for hint in body.hints():
        api.hints.report_hint(hint)


def _loaded(api: Api, content: Json) -> Json:
    """Return the answer to a request that only loads the model, which is always loaded."""
    head = {"model": api.model.id, "created_at": utc_now()}
    return {**head, **content, "done": True, "done_reason": "load"}
