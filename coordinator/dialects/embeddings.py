"""`POST /v1/embeddings`, and Ollama's `/api/embed` and `/api/embeddings`: the vectors of texts."""

from __future__ import annotations

import base64
import json
import logging
import time
from functools import partial
from typing import Any, Literal

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
from coordinator.text.embedder import Embedder, Vector
from coordinator.web.context import Api, api_of, client_of
from coordinator.web.error_responses import refused_field
from coordinator.web.request_body import Body, read_body

log = logging.getLogger(__name__)

MAX_INPUTS, MAX_TOTAL = 2048, 300_000
"""OpenAI's limits of a request: its inputs, and the tokens of all of them."""

MAX_ANSWER_BYTES = 64 * 2**20
"""Bytes. Bounds the memory of one answer."""


class EmbeddingBody(Body):
    """The fields of all three requests. `input` is a text, texts, token ids or lists of them; `prompt` is a text."""

    model: str | None = None
    input: str | Many[str] | Many[int] | Many[list[int]] = ""
    prompt: str = ""
    dimensions: int | None = Field(None, ge=1)
    encoding_format: Literal["float", "base64"] = "float"
    truncate: bool | None = None

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
@router.post("/api/embed")
@router.post("/api/embeddings")
async def embeddings(request: Request) -> Response:
    """Return the vectors of texts in the format of the path, the last of which is Ollama's older one for one text."""
    api, path, request_id, began = api_of(request), request.scope["path"], new_id("embd-"), time.perf_counter()
    assert api.embedder is not None
    is_ollama, outcome = path != "/v1/embeddings", "cancelled"
    meter = RequestMeter(api.metrics, "ollama_embed" if is_ollama else "embeddings")
    try:
        body = await read_body(request, EmbeddingBody)
        check_model(api, body.model, served=api.embedder.info)
        inputs = await _tokenize(api, api.embedder, body, is_ollama=is_ollama)
        meter.record.prompt_tokens = tokens = sum(map(len, inputs))
        async with api.embedder.open_request(client_of(request)):
            vectors = []
            for each in inputs:
                if await request.is_disconnected():
                    return Response(status_code=CLIENT_DISCONNECTED)
                vectors.append(body.write(await api.embedder.compute(each)))
        meter.record_prompt(tokens, 0)
        outcome = "stop"
        content = _answer(path, api.embedder.info.id, vectors, tokens, time.perf_counter() - began)
        return Response(content, media_type="application/json", headers={"X-Request-Id": request_id})
    except Exception as error:
        outcome = outcome_of(error)
        raise
    finally:
        facts = {"request_id": request_id, "outcome": outcome, "prompt_tokens": meter.record.prompt_tokens}
        log.info("request ended", extra={**facts, "seconds": round(meter.end(outcome), 3)})


def _answer(path: str, name: str, vectors: list[str], tokens: int, seconds: float) -> str:
    """Return the JSON of an answer."""
    if path == "/api/embeddings":
        return f'{{"embedding": {(vectors or ["[]"])[0]}}}'
    if path == "/api/embed":
        times = {"total_duration": int(seconds * 1e9), "load_duration": 0, "prompt_eval_count": tokens}
        return f'{{"embeddings": [{", ".join(vectors)}], {json.dumps({"model": name, **times})[1:]}'
    items = [f'{{"object": "embedding", "index": {i}, "embedding": {each}}}' for i, each in enumerate(vectors)]
    usage = json.dumps({"model": name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})
    return f'{{"object": "list", "data": [{", ".join(items)}], {usage[1:]}'


async def _tokenize(api: Api, embedder: Embedder, body: EmbeddingBody, *, is_ollama: bool) -> list[list[int]]:
    """Return the tokens of all inputs. Raises RequestError for a request beyond the limits."""
    given: Any = body.input or body.prompt or []
    inputs = [given] if isinstance(given, str) or isinstance(next(iter(given), None), int) else given
    if not inputs and not is_ollama:  # Ollama's clients load the model so
        raise refused_field("input", "empty. Send a text or a list of texts.")
    size = body.dimensions or embedder.size
    if size > embedder.size:
        raise refused_field("dimensions", f"{size} exceeds the {embedder.size} of this model. Send fewer.")
    number_bytes = 22 if body.encoding_format == "float" else 6
    if len(inputs) > min(MAX_INPUTS, MAX_ANSWER_BYTES // (size * number_bytes)):
        raise refused_field("input", f"{len(inputs)} inputs are too many for one request. Send fewer.")
    truncate = is_ollama if body.truncate is None else body.truncate
    found = await api.large_work.run(sum(map(len, inputs)), partial(embedder.tokenize, inputs, truncate=truncate))
    if (total := sum(map(len, found))) > MAX_TOTAL:
        raise refused_field("input", f"{total} tokens exceed the {MAX_TOTAL} of one request. Send fewer inputs.")
    return found
