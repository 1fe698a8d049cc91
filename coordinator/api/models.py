"""`GET /v1/models` in the formats of OpenAI and Anthropic, and the change of the served model."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.context import Api, api_of
from coordinator.api.errors import ModelNotLoadedError
from coordinator.api.model_catalog import ModelLoader
from coordinator.api.ollama import utc_time
from coordinator.api.request_body import Body, read_body, require_json
from coordinator.api.request_fields import HINTS
from coordinator.api.request_settings import TAG, check_model
from coordinator.text.calls import Json
from coordinator.text.tokenizer import ModelInfo
from proto.errors import NotReadyError


def wants_anthropic_format(request: Request) -> bool:
    """Return whether a client of Anthropic's API sent the request. All of them send their version of the API."""
    return "anthropic-version" in request.headers


def anthropic_model(entry: Json) -> Json:
    """Return a model of OpenAI's list in Anthropic's format. Clients show `display_name` and order by `created_at`."""
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": utc_time(entry["created"]),
        "max_input_tokens": entry["max_model_len"],
        "max_tokens": entry["max_model_len"],
        "loaded": entry["loaded"],
    }


router = APIRouter()

load_router = APIRouter()
"""The change of the model. It also answers while no model serves."""


class LoadBody(Body):
    """The model to serve: a listed one, or a repo of the hub, which is downloaded first."""

    model: str = Field(min_length=1, max_length=200)


@router.api_route("/v1/models", methods=["GET", "HEAD"])
async def models(request: Request) -> Response:
    """List the served model under its id and the names of --served-model-name, then those that can be loaded."""
    api = api_of(request)
    served = [{**describe_model(api.model), "id": name} for name in api.model.listed_names]
    listed = [*served, *await _loadable(api)]
    if wants_anthropic_format(request):
        page = {"data": [anthropic_model(entry) for entry in listed], "has_more": False}
        return JSONResponse(page | {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]})
    return JSONResponse({"object": "list", "data": listed})


@load_router.get("/v1/models/load")
async def load_report(request: Request) -> Response:
    """Return the progress of the change of the model, or the result of the last one."""
    return JSONResponse(asdict(_loader_of(request).report))


@load_router.post("/v1/models/load")
async def load_model(request: Request) -> Response:
    """Begin to serve another model. `GET` returns the progress."""
    require_json(request)
    body = await read_body(request, LoadBody)
    report = _loader_of(request).start(body.model.removesuffix(TAG))
    return JSONResponse(asdict(report), status_code=202)


@router.api_route("/v1/models/{name:path}", methods=["GET", "HEAD"])
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
    """Return the served model in OpenAI's format. `max_model_len`, vLLM's name, is the context in tokens."""
    entry = _entry(model.id, model.created, model.context_length, loaded=True)
    return {**entry, "ignored_fields": sorted(HINTS)}


def _entry(name: str, created: int, context: int, *, loaded: bool) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "mtp-cluster",
        "loaded": loaded,
        "max_model_len": context or None,
    }


async def _loadable(api: Api) -> list[Json]:
    """Return the other models on this machine."""
    found, created = await api.loadable_models(), api.model.created
    return [_entry(each.name, created, each.context, loaded=False) for each in found]


def _loader_of(request: Request) -> ModelLoader:
    loader = api_of(request).model_loader
    if loader is None:
        raise NotReadyError("this server cannot change its model")
    return loader
