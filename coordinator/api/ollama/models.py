"""`/api/tags`, `/api/show`, `/api/ps`, `/api/version`, and refusals of Ollama's model management."""

from __future__ import annotations

import hashlib

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.ollama.names import check_name, tagged_name
from coordinator.api.ollama.schemas import ShowBody
from coordinator.api.ollama.timestamp import utc_time
from coordinator.api.request.body import read_body
from coordinator.api.request.context import Api, api_of
from coordinator.text.model_info import Json
from proto.errors import RequestError

OLLAMA_VERSION = "0.12.6"
"""The version of Ollama whose API this dialect follows. Clients compare it with the versions they require."""

NEVER = 253402300799.0
"""Seconds since 1970 at the end of the year 9999: the model is not unloaded while the server runs."""

router = APIRouter()

refusals = APIRouter()
"""The routes that always answer with an error, which explains why."""


@router.get("/api/version")
async def version() -> Response:
    """Return the version of the API."""
    return JSONResponse({"version": OLLAMA_VERSION})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """List the served model and its aliases, then the other models on this machine."""
    api = api_of(request)
    others = [] if api.model_loader is None else await api.model_loader.list_models()
    entries = [
        _entry(
            found.name,
            found.name,
            found.nbytes,
            api.model.created,
            _details(found.family, found.quantization),
        )
        for found in others
        if found.name not in api.model.listed_names
    ]
    return JSONResponse({"models": [*_entries(api), *entries]})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """List the loaded model, with its size on all nodes and its context."""
    api = api_of(request)
    context, expires = api.model.context_length, utc_time(NEVER)
    extra = {"expires_at": expires, "size_vram": _size(api), "context_length": context}
    return JSONResponse({"models": [{**entry, **extra} for entry in _entries(api)]})


@router.post("/api/show")
async def show(request: Request) -> Response:
    """Describe the served model."""
    body = await read_body(request, ShowBody)
    api = api_of(request)
    name = body.model or body.name
    if name is None:
        raise RequestError("model: required. Send the model's name.", param="model")
    check_name(api, name)
    capabilities = ["completion"]
    capabilities += ["tools"] if api.tokenizer.has_tools else []
    capabilities += ["thinking"] if api.tokenizer.reasoning_end else []
    family = api.model.family
    return JSONResponse(
        {
            "details": _details(family, api.model.quantization),
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": api.model.context_length,
            },
            "capabilities": capabilities,
            "modified_at": utc_time(api.model.created),
        }
    )


@refusals.post("/api/embed")
@refusals.post("/api/embeddings")
async def embed() -> Response:
    """Reject a request for embeddings."""
    raise RequestError("embeddings: this server generates text only. Use an embedding server.")


@refusals.post("/api/pull")
@refusals.post("/api/push")
@refusals.post("/api/create")
@refusals.post("/api/copy")
@refusals.delete("/api/delete")
async def manage(request: Request) -> Response:
    """Reject the management of models."""
    raise RequestError(
        f"{request.scope['path']}: models are managed with mtp-coord load and POST /v1/models/load."
    )


def _entries(api: Api) -> list[Json]:
    """Return the entries of the served model."""
    created, size = api.model.created, _size(api)
    details = _details(api.model.family, api.model.quantization)
    return [_entry(name, api.model.id, size, created, details) for name in api.model.listed_names]


def _entry(name: str, model: str, nbytes: int, created: int, details: Json) -> Json:
    return {
        "name": tagged_name(name),
        "model": tagged_name(name),
        "modified_at": utc_time(created),
        "size": nbytes,
        "digest": hashlib.sha256(model.encode()).hexdigest(),
        "details": details,
    }


def _size(api: Api) -> int:
    """Return the memory in use on all nodes, in bytes."""
    return sum(node.memory_used for node in api.status.status().nodes)


def _details(family: str, quantization: str) -> Json:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": quantization,
    }
