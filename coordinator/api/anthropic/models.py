"""The list of models in Anthropic's format, which `GET /v1/models` has for clients of Anthropic's API."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.requests import Request

from coordinator.api.request.query import number_in_query
from coordinator.text.model_info import Json
from proto.errors import RequestError

PAGE_MODELS = 20
MAX_PAGE_MODELS = 1000
"""Models per page, by default and at most, as at Anthropic."""


def wants_anthropic_format(request: Request) -> bool:
    """Return whether a client of Anthropic's API sent the request. All of them send their version of the API."""
    return "anthropic-version" in request.headers


def anthropic_model(entry: Json) -> Json:
    """Return a model of OpenAI's list in Anthropic's format. Clients show `display_name` and order by `created_at`."""
    created = datetime.fromtimestamp(entry["created"], UTC).isoformat()
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": created.replace("+00:00", "Z"),
        "max_input_tokens": entry["max_model_len"],
        "max_tokens": entry["max_model_len"],
        "loaded": entry["loaded"],
    }


def anthropic_page(request: Request, entries: Sequence[Json]) -> Json:
    """Return the page of `entries` that `limit`, `after_id` and `before_id` ask for. Raises RequestError."""
    limit = number_in_query(request, "limit", PAGE_MODELS)
    if not 1 <= limit <= MAX_PAGE_MODELS:
        raise RequestError(f"limit: {limit} is not from 1 to {MAX_PAGE_MODELS}", param="limit")
    start = _place(request, entries, "after_id", -1) + 1
    end = _place(request, entries, "before_id", len(entries))
    backwards = "before_id" in request.query_params
    found = entries[start:end]
    page = found[-limit:] if backwards else found[:limit]
    return {
        "data": [anthropic_model(entry) for entry in page],
        "has_more": len(found) > len(page),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _place(request: Request, entries: Sequence[Json], param: str, default: int) -> int:
    """Return the place of the model that a parameter names."""
    name = request.query_params.get(param)
    if name is None:
        return default
    for place, entry in enumerate(entries):
        if entry["id"] == name:
            return place
    raise RequestError(f"{param}: no model has the id {name!r:.80}", param=param)
