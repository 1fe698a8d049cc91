"""`POST /v1/embeddings`, and Ollama's `/api/embed` and `/api/embeddings`: the vectors of texts."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from coordinator.answers.choice import new_id
from coordinator.answers.delivery import CLIENT_DISCONNECTED, outcome_of
from coordinator.prompts.message_fields import Many
from coordinator.prompts.request_settings import check_model
from coordinator.status.metrics import RequestMeter
from coordinator.text.embedder import Embedder, Tokens, Vector
from coordinator.web.context import Api, api_of, client_of
from coordinator.web.error_responses import refused_field
from coordinator.web.request_body import Body, read_body

log = logging.getLogger(__name__)

MAX_INPUTS, MAX_TOTAL = 2048, 300_000
"""OpenAI's limits of a request: its inputs, and the tokens of all of them."""

MAX_ANSWER_BYTES = 64 * 2**20
"""Bytes. Bounds the memory of one answer."""

NUMBER_BYTES = {"float": 22, "base64": 6}
"""Bytes of one number of a vector in an answer."""


class EmbeddingBody(Body):
    """The fields of all three requests. `input` is a text, texts, token ids or lists of them; `prompt` is a text."""

    model: str | None = None
    input: str | Many[str] | Many[int] | Many[list[int]] = ""
    prompt: str = ""
    dimensions: int | None = Field(None, ge=1)
    encoding_format: Literal["float", "base64"] = "float"
    truncate: bool | None = None

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        given = self.input or self.prompt
        if isinstance(given, str):
            return [given] if given else []
        tokens = [token for token in given if isinstance(token, int)]
        return [tokens] if tokens else [each for each in given if not isinstance(each, int)]

    def write(self, vector: Vector) -> str:
        """Return the JSON of a vector, which keeps its length of 1 when `dimensions` cuts it."""
        if self.dimensions is not None:
            vector = vector[: self.dimensions] / np.linalg.norm(vector[: self.dimensions])
        if self.encoding_format == "base64":
            return f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode()}"'
        return json.dumps(vector.tolist())


router = APIRouter()
"""The endpoints of a server with an embedding model."""


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    """Return the vectors of texts in OpenAI's format."""

    def write(name: str, vectors: list[str], tokens: int, seconds: float) -> str:
        items = [f'{{"object": "embedding", "index": {i}, "embedding": {each}}}' for i, each in enumerate(vectors)]
        usage = json.dumps({"model": name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})
        return f'{{"object": "list", "data": [{", ".join(items)}], {usage[1:]}'

    return await _serve(request, "embeddings", write)


@router.post("/api/embed")
async def embed(request: Request) -> Response:
    """Return the vectors of texts in Ollama's format."""

    def write(name: str, vectors: list[str], tokens: int, seconds: float) -> str:
        times = {"total_duration": int(seconds * 1e9), "load_duration": 0, "prompt_eval_count": tokens}
        return f'{{"embeddings": [{", ".join(vectors)}], {json.dumps({"model": name, **times})[1:]}'

    return await _serve(request, "ollama_embed", write)


@router.post("/api/embeddings")
async def embedding(request: Request) -> Response:
    """Return the vector of one text in the older format of Ollama."""
    return await _serve(request, "ollama_embed", lambda name, vectors, *_: f'{{"embedding": {(vectors or ["[]"])[0]}}}')


async def _serve(request: Request, endpoint: str, write: Callable[[str, list[str], int, float], str]) -> Response:
    """Answer a request. `write` gets the model's name, the vectors, the number of tokens and the seconds."""
    api, request_id = api_of(request), new_id("embd-")
    assert api.embedder is not None
    meter, began, outcome = RequestMeter(api.metrics, endpoint), time.perf_counter(), "cancelled"
    vectors: list[str] = []
    try:
        body = await read_body(request, EmbeddingBody)
        check_model(api, body.model, served=api.embedder.info)
        inputs = await _tokenize(api, api.embedder, body, is_ollama=endpoint != "embeddings")
        meter.record.prompt_tokens = sum(map(len, inputs))
        async with api.embedder.open_request(client_of(request)) as compute:
            for tokens in inputs:
                if await request.is_disconnected():
                    return Response(status_code=CLIENT_DISCONNECTED)
                vectors.append(body.write(await compute(tokens)))
        meter.record_prompt(meter.record.prompt_tokens, 0)
        outcome = "stop"
        seconds = time.perf_counter() - began
        content = write(api.embedder.info.id, vectors, meter.record.prompt_tokens, seconds)
        return Response(content, media_type="application/json", headers={"X-Request-Id": request_id})
    except Exception as error:
        outcome = outcome_of(error)
        raise
    finally:
        facts = {"request_id": request_id, "outcome": outcome, "prompt_tokens": meter.record.prompt_tokens}
        log.info("request ended", extra={**facts, "seconds": round(meter.end(outcome), 3)})


async def _tokenize(api: Api, embedder: Embedder, body: EmbeddingBody, *, is_ollama: bool) -> list[Tokens]:
    """Return the tokens of all inputs. Raises RequestError for a request beyond the limits."""
    inputs, size = body.inputs, body.dimensions or embedder.size
    if not inputs and not is_ollama:  # Ollama's clients load the model so
        raise refused_field("input", "empty. Send a text or a list of texts.")
    if size > embedder.size:
        raise refused_field("dimensions", f"{size} exceeds the {embedder.size} of this model. Send fewer.")
    if len(inputs) > min(MAX_INPUTS, MAX_ANSWER_BYTES // (size * NUMBER_BYTES[body.encoding_format])):
        raise refused_field("input", f"{len(inputs)} inputs are too many for one request. Send fewer.")
    truncate = is_ollama if body.truncate is None else body.truncate
    tokenize = partial(embedder.tokenize, inputs, truncate=truncate)
    found = await api.large_work.run(sum(map(len, inputs)), tokenize)
    if (total := sum(map(len, found))) > MAX_TOTAL:
        raise refused_field("input", f"{total} tokens exceed the {MAX_TOTAL} of one request. Send fewer inputs.")
    return found
