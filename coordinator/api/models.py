"""`GET /v1/models`: the one model that is served."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.context import api_of
from coordinator.api.parameters import check_model
from coordinator.text.model_info import Json, ModelInfo

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """List it."""
    return JSONResponse({"object": "list", "data": [describe(api_of(request).model)]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """Describe it by its id or an alias."""
    api = api_of(request)
    check_model(api, name)
    return JSONResponse(describe(api.model))


def describe(model: ModelInfo) -> Json:
    """As OpenAI does; `max_model_len`, vLLM's name, is the context in tokens."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "mtp-cluster",
        "max_model_len": model.context_length,
    }
