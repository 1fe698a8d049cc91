"""`GET /v1/models`: the models on this machine. `POST /v1/models/load` changes the served one."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.anthropic.models import (
    anthropic_model,
    anthropic_page,
    wants_anthropic_format,
)
from coordinator.api.request.body import Body, read_body
from coordinator.api.request.context import Api, api_of
from coordinator.api.request.errors import ModelNotLoadedError
from coordinator.api.request.hints import HINTS
from coordinator.api.request.settings import check_model
from coordinator.models.loader import ModelLoader
from coordinator.text.model_info import Json, ModelInfo
from proto.errors import NotReadyError, RequestError

router = APIRouter()

load_router = APIRouter()
"""The change of the model. It also answers while no model serves."""


class LoadBody(Body):
    """The model to serve: a listed one, or a repo of the hub, which is downloaded first."""

    model: str = Field(min_length=1, max_length=200)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """List the served model under its id and the names of --served-model-name, then those that can be loaded."""
    api = api_of(request)
    served = [{**describe_model(api.model), "id": name} for name in api.model.listed_names]
    listed = [*served, *await _loadable(api)]
    if wants_anthropic_format(request):
        return JSONResponse(anthropic_page(request, listed))
    return JSONResponse({"object": "list", "data": listed})


@load_router.get("/v1/models/load")
async def load_report(request: Request) -> Response:
    """Return the progress of the change of the model, or the result of the last one."""
    return JSONResponse(asdict(_loader_of(request).report))


@load_router.post("/v1/models/load")
async def load_model(request: Request) -> Response:
    """Begin to serve another model. `GET` returns the progress."""
    # Without this check a web page could send the request across sites, because a form needs no permission.
    if request.headers.get("content-type") != "application/json":
        raise RequestError("/v1/models/load: send the header Content-Type: application/json")
    body = await read_body(request, LoadBody)
    report = _loader_of(request).start(body.model)
    return JSONResponse(asdict(report), status_code=202)


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """Describe the model with the id or alias `name`."""
    api = api_of(request)
    found = describe_model(api.model)
    try:
        check_model(api, name)
    except ModelNotLoadedError:
        loadable = [entry for entry in await _loadable(api) if entry["id"] == name]
        if not loadable:
            raise
        found = loadable[0]
    return JSONResponse(anthropic_model(found) if wants_anthropic_format(request) else found)


def describe_model(model: ModelInfo) -> Json:
    """Return the served model in OpenAI's format.

    `max_model_len`, vLLM's name, is the context in tokens. `ignored_fields` are the request fields without effect.
    """
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "mtp-cluster",
        "loaded": True,
        "max_model_len": model.context_length,
        "ignored_fields": list(HINTS),
    }


async def _loadable(api: Api) -> list[Json]:
    """Return the other models on this machine."""
    if api.model_loader is None:
        return []
    return [
        {
            "id": found.name,
            "object": "model",
            "created": api.model.created,
            "owned_by": "mtp-cluster",
            "loaded": False,
            "max_model_len": found.context or None,
        }
        for found in await api.model_loader.list_models()
        if found.name not in api.model.listed_names
    ]


def _loader_of(request: Request) -> ModelLoader:
    loader = api_of(request).model_loader
    if loader is None:
        raise NotReadyError("this server cannot change its model")
    return loader
