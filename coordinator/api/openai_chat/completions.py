"""`POST /v1/completions`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.answer.delivery import PreparedAnswer, serve_answer
from coordinator.api.answer.generated_answer import new_id, text_answer
from coordinator.api.openai_chat.completion_writer import CompletionWriter
from coordinator.api.openai_chat.echo import with_scored_prompt
from coordinator.api.openai_chat.schemas import CompletionBody
from coordinator.api.request.body import read_body
from coordinator.api.request.context import Api
from coordinator.api.request.settings import check_model, check_prompt
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
    output = body.structured_outputs.output() if body.structured_outputs else None
    answer = await text_answer(
        api, body.settings(), prompts, new_id("cmpl-"), user=body.user, output=output
    )
    if body.scores_prompt:
        generate = body.max_tokens != 0
        choices = [await with_scored_prompt(api, c, generate=generate) for c in answer.choices]
        answer = replace(answer, choices=choices)
    prompts_of_choices = [choice.request.prompt for choice in answer.choices]
    echoes = [_text(api, prompt) for prompt in prompts_of_choices] if body.echo else []
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
        return await api.large_work.run(len(prompt), partial(api.tokenizer.encode, prompt))
    return check_prompt(api, prompt)


def _text(api: Api, tokens: tuple[int, ...]) -> str:
    return b"".join(map(api.tokenizer.token_bytes, tokens)).decode("utf-8", "replace")
