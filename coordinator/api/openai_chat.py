"""`POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.choice import chat_answer, new_id, text_answer
from coordinator.api.context import Api
from coordinator.api.delivery import PreparedAnswer, serve_answer
from coordinator.api.openai_schemas import ChatBody, CompletionBody, Message
from coordinator.api.openai_writers import ChatWriter, CompletionWriter
from coordinator.api.request_body import read_body
from coordinator.api.request_settings import (
    ChatRequest,
    call_message,
    check_model,
    check_prompt,
    reasoning_of,
)
from coordinator.text.calls import Json

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Generate the next message of a conversation."""
    return await serve_answer(request, "chat", prepare)


async def prepare(api: Api, request: Request) -> PreparedAnswer:
    """Read the body and render the conversation. Raises RequestError, naming the invalid field."""
    body = await read_body(request, ChatBody)
    check_model(api, body.model)
    thinking, budget = reasoning_of(body.reasoning_effort)
    tools = [tool.for_template() for tool in body.tools or ()]
    chat = ChatRequest(
        messages=[template_message(each, api.tokenizer.tool_markers) for each in body.messages],
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
    answer = await chat_answer(api, chat, new_id("chatcmpl-"))
    writer = ChatWriter(answer, api.tokenizer, body.stream_options)
    return PreparedAnswer(answer, writer, bool(body.stream))


def template_message(message: Message, markers: tuple[str, str]) -> Json:
    """Return a message as chat templates read it: no nulls, `system` for `developer`, arguments as objects."""
    role = "system" if message.role == "developer" else message.role
    turn: Json = {"role": role, "content": message.text}
    if message.tool_calls is not None:
        calls = [(c.id or "", c.function.name, c.function.arguments) for c in message.tool_calls]
        turn |= call_message(turn["content"], calls, markers)
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    return turn


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Generate the continuation of a text."""
    return await serve_answer(request, "completions", prepare_completion)


async def prepare_completion(api: Api, request: Request) -> PreparedAnswer:
    """Read the body and tokenize its prompts. Raises RequestError, naming the invalid field."""
    body = await read_body(request, CompletionBody)
    check_model(api, body.model)
    prompts = [await _tokens(api, prompt) for prompt in body.prompts]
    answer = await text_answer(api, body.settings(), prompts, new_id("cmpl-"), user=body.user)
    echoes = [_text(api, choice.request.prompt) for choice in answer.choices] if body.echo else ()
    writer = CompletionWriter(answer, api.tokenizer, body.stream_options, echoes)
    return PreparedAnswer(answer, writer, stream=bool(body.stream))


async def _tokens(api: Api, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await api.large_work.run(len(prompt), partial(api.tokenizer.encode, prompt))
    return check_prompt(api, prompt)


def _text(api: Api, tokens: tuple[int, ...]) -> str:
    return b"".join(map(api.tokenizer.token_bytes, tokens)).decode("utf-8", "replace")
