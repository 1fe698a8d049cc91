"""`GET /v1/models`: the served model and its aliases."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.request.context import api_of
from coordinator.api.request.hints import HINTS
from coordinator.api.request.settings import check_model
from coordinator.text.model_info import Json, ModelInfo

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """List the served model under its id, and under the names of --served-model-name."""
    served = api_of(request).model
    data = [{**describe_model(served), "id": name} for name in served.listed_names]
    return JSONResponse({"object": "list", "data": data})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """Describe the model with the id or alias `name`."""
    api = api_of(request)
    check_model(api, name)
    return JSONResponse(describe_model(api.model))


def describe_model(model: ModelInfo) -> Json:
    """Return the model in OpenAI's format.

    `max_model_len`, vLLM's name, is the context in tokens. `ignored_fields` are the request fields without effect.
    """
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "mtp-cluster",
        "max_model_len": model.context_length,
        "ignored_fields": list(HINTS),
    }
