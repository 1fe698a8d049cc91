"""`POST /v1/completions`: text in, text on."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.body import read_body
from coordinator.api.choice import Choice
from coordinator.api.context import Api
from coordinator.api.delivery import serve
from coordinator.api.http_answer import Answer, new_id
from coordinator.api.logprobs import completion_logprobs
from coordinator.api.parameters import check_model, check_prompt, requests_of, stops_of
from coordinator.api.schemas import CompletionBody
from coordinator.generation.request import GenerationRequest
from coordinator.text.detokenizer import Piece
from coordinator.text.model_info import Json
from coordinator.text.tokenizer import Tokenizer
from proto.errors import RequestError
from proto.frame import TokenLogprob

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Go on from a text."""
    return await serve(request, "completions", prepare)


async def prepare(api: Api, request: Request) -> Answer:
    """Read the body and tokenize its prompts. Raises RequestError, naming the field that is wrong."""
    body = await read_body(request, CompletionBody)
    check_model(api, body.model)
    prompts = [await _tokens(api, prompt) for prompt in prompts_of(body)]
    answer_id = new_id("cmpl")
    stops = stops_of(api, body)
    requests = requests_of(
        api,
        body,
        prompts,
        request_id=answer_id,
        stops=stops,
        logprobs=body.logprobs,
    )
    return Answer(
        id=answer_id,
        kind="text_completion",
        chunk_kind="text_completion",
        model=api.model.id,
        choices=[
            TextChoice(index, each, api.tokenizer, stops.strings)
            for index, each in enumerate(requests)
        ],
        per_prompt=body.n or 1,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        user=body.user,
        names={"max_tokens": body.limit_field, "prompt": body.prompt_field},
    )


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The body's prompts, of whatever shape, as a list. Raises RequestError when there is none."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt: the list is empty", param="prompt")
    tokens = [token for token in prompt if isinstance(token, int)]
    return [tokens] if tokens else [each for each in prompt if not isinstance(each, int)]


async def _tokens(api: Api, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await asyncio.to_thread(api.tokenizer.encode, prompt)
    return check_prompt(api, prompt)


class TextChoice(Choice):
    """A choice that is its text, as generated."""

    def __init__(
        self, index: int, request: GenerationRequest, tokenizer: Tokenizer, stop: tuple[str, ...]
    ) -> None:
        super().__init__(index, request, tokenizer, stop)
        self._pieces: list[Piece] = []
        self._sent = 0  # of them
        self._told: list[TokenLogprob] = []

    def opening(self) -> list[Json]:
        return []

    def result(self) -> Json:
        return self._entry(Piece.join(self._pieces), self._told, self.finish_reason)

    def _read(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def _read_end(self) -> None:
        pass

    def _flush(self) -> list[Json]:
        piece = Piece.join(self._pieces[self._sent :])
        self._sent = len(self._pieces)
        logprobs = self._take_logprobs(piece)
        self._told += logprobs
        return [self._entry(piece, logprobs)] if piece.text or logprobs else []

    def _closing(self) -> Json:
        return self._entry(Piece(), [], self.finish_reason)

    def _entry(
        self, piece: Piece, logprobs: list[TokenLogprob], finish_reason: str | None = None
    ) -> Json:
        told = completion_logprobs(self._tokenizer, piece, logprobs) if logprobs else None
        return {
            "index": self.index,
            "text": piece.text,
            "logprobs": told,
            "finish_reason": finish_reason,
        }
