"""The endpoints beside those of answers: health, status, metrics, plans, traces, invitations, and models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.answers.stored_answers import UnknownAnswerError
from coordinator.dialects.ollama import utc_time
from coordinator.planning.chips import chip_speed
from coordinator.planning.recommend import joined_spec, recommendations
from coordinator.prompts.request_settings import TAG, check_model
from coordinator.serve.client_settings import AGENTS, Endpoint, other_clients
from coordinator.text.schemas import Json
from coordinator.text.tokenizer import ModelInfo
from coordinator.trust.client_access import ClientAccess, Invitation
from coordinator.trust.keys import is_own_connection
from coordinator.web.access import check_origin
from coordinator.web.context import Api, api_of, client_of
from coordinator.web.live_feed import feed_of
from coordinator.web.model_catalog import ModelLoader
from coordinator.web.request_body import Body, read_body, require_json
from mtp.checkpoint.hub.resolve import free_bytes
from proto.errors import AccessError, ClusterError, NotReadyError

log = logging.getLogger(__name__)

open_router = APIRouter()
"""The routes for load balancers, supervisors and new clients, which need no key."""

router = APIRouter()

Text = Annotated[str, Query(max_length=200)]


@open_router.get("/v1/connect")
def show_authorities(request: Request) -> Response:
    """Return the certificates of the authorities, which a new client compares with its token."""
    return JSONResponse({"authorities": _clients_of(request).authorities})


@open_router.post("/v1/connect")
def admit_client(request: Request, token_id: Text, proof: Text, name: Text) -> Response:
    """Return an API key for the holder of a token."""
    check_origin(request)
    clients, peer = _clients_of(request), request.client.host if request.client else ""
    reply = {"api_key": clients.admit(token_id, proof, name), "authorities": clients.authorities}
    log.info("client connected", extra={"client": name, "peer": peer})
    return JSONResponse(reply)


def _clients_of(request: Request) -> ClientAccess:
    clients = api_of(request).options.clients
    if clients is None:
        raise AccessError("This server has no certificate of the cluster. Start it with --host, without --tls-cert.")
    return clients


@open_router.api_route("/health", methods=["GET", "HEAD"])
async def health() -> Response:
    """Answer 200 while the process runs, also before it serves: see /ready."""
    return JSONResponse({"status": "ok"})


@open_router.get("/ready")
async def ready(request: Request) -> Response:
    """Answer 200 while a plan is serving, otherwise 503 with Retry-After."""
    if not api_of(request).status.status().ready:
        raise NotReadyError("No plan is serving yet. Try again later.")
    return JSONResponse({"status": "ready"})


@router.get("/status")
async def status(request: Request) -> Response:
    """Return the fields of `ClusterStatus`, with the open and the last requests and the last events."""
    api, feed = api_of(request), feed_of(request)
    return JSONResponse(
        {
            **asdict(api.status.status()),
            "open_requests": [asdict(one) for one in api.metrics.request_log.open_requests()],
            "ended_requests": [asdict(one) for one in api.metrics.request_log.recent],
            "events": [asdict(event) for event in feed.events.events],
        }
    )


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' format."""
    return Response(api_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


MAX_SECONDS = 600.0
"""Seconds. Longest period of a trace. The processes keep about a minute of a fast stream anyway."""


@router.get("/trace")
async def trace(request: Request, seconds: Annotated[float, Query(gt=0, le=MAX_SECONDS)] = 5) -> Response:
    """Return the trace of the last `seconds`: `trace` in Chrome's trace format, and `table` with median times."""
    collect_trace = api_of(request).collect_trace
    if collect_trace is None:
        raise NotReadyError("no plan is serving yet. Try again later")
    return JSONResponse(await collect_trace(seconds))


cluster_router = APIRouter(prefix="/v1/cluster")


@cluster_router.get("/models")
async def cluster_models(request: Request) -> Response:
    """List the models on this machine, the name of the served one, and the free bytes of the disk of downloads."""
    found = await _loader_of(request).list_models()
    served, free = api_of(request).model.id, await asyncio.to_thread(free_bytes)
    return JSONResponse({"served": served, "free_bytes": free, "models": [asdict(one) for one in found]})


@cluster_router.post("/invitations")
async def invite(request: Request) -> Response:
    """Return the command with which a machine joins. It holds a secret, so a server without API keys refuses."""
    require_json(request)
    return JSONResponse(asdict((await _inviter(request))()))


@cluster_router.get("/invitations")
async def invitations(request: Request) -> Response:
    """Return `problem`: why this server cannot invite a machine, for people; empty if it can."""
    try:
        await _inviter(request)
    except ClusterError as error:
        return JSONResponse({"problem": str(error)})
    return JSONResponse({"problem": ""})


PROXY_HEADERS = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})
"""Headers that a proxy adds. With them `request.client` may be an address that only a header names."""


async def _inviter(request: Request) -> Callable[[], Invitation]:
    """Return the function that makes an invitation. Raises AccessError or NotReadyError if there is none.

    Without keys only other processes of this process's user get one, and none through a proxy: a proxy of this user
    would vouch for everyone behind it.
    """
    api = api_of(request)
    known = api.options.needs_key
    client, server = request.client, request.scope.get("server")
    if not known and client and server and PROXY_HEADERS.isdisjoint(request.headers):
        known = await asyncio.to_thread(is_own_connection, client, server)
    if not known:
        raise AccessError(
            "invitations need an API key with the scope admin. Create one with mtp-coord key create NAME "
            "--scope admin, or run mtp-coord token create on the coordinator's machine"
        )
    if api.invite is None:
        raise NotReadyError("machines cannot join: start mtp-coord serve with --listen")
    return api.invite


@cluster_router.post("/requests/{answer_id}/stop")
async def stop_request(request: Request, answer_id: str) -> Response:
    """Stop a request of any client. Its answer ends with an error, and a stored answer as a cancelled one."""
    require_json(request)
    stop = api_of(request).metrics.request_log.stops.get(answer_id)
    if stop is None:
        raise UnknownAnswerError(f"{answer_id!r:.80}: not found. The request has ended.")
    log.info("request stopped", extra={"request_id": answer_id, "by": client_of(request)})
    stop()
    return JSONResponse({"id": answer_id})


@cluster_router.get("/recommendations")
async def recommendations_of(request: Request) -> Response:
    """Return the published models that fit the machines of the cluster, the largest first.

    `measured` names the machines whose speed does not follow from their chip.
    """
    nodes = [(n, n.memory_limit) for n in api_of(request).status.status().nodes if n.health != "refused"]
    specs = [joined_spec(n.name, limit, n.bytes_per_second, n.chip) for n, limit in nodes if limit]
    measured = [n.name for n, limit in nodes if limit and chip_speed(n.chip, limit) is None]
    found = await asyncio.to_thread(recommendations, specs) if specs else []
    return JSONResponse({"models": [asdict(one) for one in found], "measured": measured})


PLACE = "~/mtp-settings"
"""A directory for the files of settings that are copied without mtp-coord."""


@cluster_router.get("/connect")
async def connect(request: Request) -> Response:
    """Return the settings of other programs for this server: `agents` that `mtp-coord launch` starts, and `clients`."""
    model, root = api_of(request).model, str(request.base_url).rstrip("/")
    # The key of the page is not known here.
    server = Endpoint(root, "YOUR_KEY", model.id, model.context_length)
    agents = [
        {"name": a.name, "title": a.title, "install": a.install, "text": a.setup(server).placed(PLACE).text(a.program)}
        for a in AGENTS.values()
    ]
    clients = [dict(zip(("title", "hint", "text"), one, strict=True)) for one in other_clients(server)]
    return JSONResponse({"agents": agents, "clients": clients})


# ---- `/v1/models` in the formats of OpenAI and Anthropic, and the change of the served model


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


models_router = APIRouter()

load_router = APIRouter()
"""The change of the model. It also answers while no model serves."""


class LoadBody(Body):
    """The model to serve: a listed one, or a repo of the hub, which is downloaded first."""

    model: str = Field(min_length=1, max_length=200)


@models_router.api_route("/v1/models", methods=["GET", "HEAD"])
async def models(request: Request) -> Response:
    """List the served models under their ids and the names of --served-model-name, then those that can be loaded."""
    api = api_of(request)
    served = [{**served_entry(model), "id": name} for model in api.served_models for name in model.listed_names]
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


@models_router.api_route("/v1/models/{name:path}", methods=["GET", "HEAD"])
async def model(request: Request, name: str) -> Response:
    """Describe the model with the id or alias `name`."""
    api = api_of(request)
    loadable = [entry for entry in await _loadable(api) if entry["id"] == name]
    served = next((one for one in api.served_models if one.answers_to(name)), api.model)
    if not loadable:
        check_model(api, name, strictly=True, served=served)
    found = loadable[0] if loadable else served_entry(served)
    return JSONResponse(anthropic_model(found) if wants_anthropic_format(request) else found)


def served_entry(model: ModelInfo) -> Json:
    """Return the served model in OpenAI's format. `max_model_len`, vLLM's name, is the context in tokens."""
    return _entry(model.id, model.created, model.context_length, loaded=True)


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
