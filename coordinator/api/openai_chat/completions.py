"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.answer.choice import Choice
from coordinator.api.answer.delivery import PreparedAnswer, serve_answer
from coordinator.api.answer.generated_answer import GeneratedAnswer, new_id
from coordinator.api.openai_chat.completion_writer import CompletionWriter
from coordinator.api.openai_chat.schemas import CompletionBody
from coordinator.api.request.body import read_body
from coordinator.api.request.context import Api
from coordinator.api.request.settings import check_model, check_prompt, requests_of, stops_of
from proto.errors import RequestError

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Generate the continuation of a text."""
    return await serve_answer(request, "completions", prepare)


async def prepare(api: Api, request: Request) -> PreparedAnswer:
    """Read the body and tokenize its prompts. Raises RequestError, naming the invalid field."""
    body = await read_body(request, CompletionBody)
    check_model(api, body.model)
    for hint in body.hints():
        api.hints.report_hint(hint)
    prompts = [await _tokens(api, prompt) for prompt in prompts_of(body)]
    answer_id = new_id("cmpl-")
    settings = body.settings()
    stops = stops_of(api, settings)
    requests = requests_of(api, settings, prompts, request_id=answer_id, stops=stops)
    answer = GeneratedAnswer(
        id=answer_id,
        model=api.model.id,
        settings=settings,
        choices=[
            Choice(index, each, api.tokenizer, stops.strings) for index, each in enumerate(requests)
        ],
        per_prompt=settings.n,
        user=body.user,
    )
    echoes = [_text(api, each.prompt) for each in requests] if body.echo else []
    writer = CompletionWriter(answer, api.tokenizer, body.stream_options, echoes)
    return PreparedAnswer(answer, writer, stream=bool(body.stream))


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """Return the body's prompts, of any of the accepted shapes, as a list. Raises RequestError for an empty list."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt: the list is empty. Send at least one prompt.", param="prompt")
    tokens = [token for token in prompt if isinstance(token, int)]
    return [tokens] if tokens else [each for each in prompt if not isinstance(each, int)]


async def _tokens(api: Api, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await asyncio.to_thread(api.tokenizer.encode, prompt)
    return check_prompt(api, prompt)


def _text(api: Api, tokens: tuple[int, ...]) -> str:
    return b"".join(map(api.tokenizer.token_bytes, tokens)).decode("utf-8", "replace")
