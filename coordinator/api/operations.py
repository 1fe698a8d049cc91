"""The endpoints for operators and the page: health, status, metrics, plans, traces, models, invitations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.context import Api, api_of
from coordinator.api.request_body import keys_are_set, require_json
from coordinator.trust.cluster_trust import Invitation
from coordinator.web.page import feed_of
from proto.errors import AccessError, ClusterError, NotReadyError, RequestError

open_router = APIRouter()
"""The routes for load balancers and supervisors, which need no key."""

router = APIRouter()


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


@router.post("/replan")
async def replan(request: Request) -> Response:
    """Make a new plan over the workers that are available. Open answers pause while layers move."""
    require_json(request)
    request_plan = api_of(request).replan
    if request_plan is None:
        raise RequestError("/replan: this server runs in single-node mode and has no workers")
    request_plan()
    return JSONResponse({"status": "planning"}, status_code=202)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' format."""
    return Response(api_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


MAX_SECONDS = 600.0
"""Seconds. Longest period of a trace. The processes keep about a minute of a fast stream anyway."""


@router.get("/trace")
async def trace(request: Request) -> Response:
    """Return the trace of the last `seconds`: `trace` in Chrome's trace format, and `table` with median times."""
    text = request.query_params.get("seconds", "5")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_SECONDS:
        raise RequestError(f"seconds={text}: give a number above 0, up to {MAX_SECONDS:g}")
    collect_trace = api_of(request).collect_trace
    if collect_trace is None:
        raise NotReadyError("no plan is serving yet. Try again later")
    return JSONResponse(await collect_trace(seconds))


cluster_router = APIRouter(prefix="/v1/cluster")


@cluster_router.get("/models")
async def models(request: Request) -> Response:
    """List the models on this machine, and the name of the served one."""
    api = api_of(request)
    if api.model_loader is None:
        raise NotReadyError("this server has no models to manage")
    found = await api.model_loader.list_models()
    return JSONResponse({"served": api.model.id, "models": [asdict(one) for one in found]})


@cluster_router.post("/invitations")
async def invite(request: Request) -> Response:
    """Return the command with which a machine joins. It holds a secret, so a server without API keys refuses."""
    require_json(request)
    return JSONResponse(asdict(_inviter(api_of(request))()))


@cluster_router.get("/invitations")
async def invitations(request: Request) -> Response:
    """Return `problem`: why this server cannot invite a machine, for people; empty if it can."""
    try:
        _inviter(api_of(request))
    except ClusterError as error:
        return JSONResponse({"problem": str(error)})
    return JSONResponse({"problem": ""})


def _inviter(api: Api) -> Callable[[], Invitation]:
    """Return the function that makes an invitation. Raises AccessError or NotReadyError if there is none."""
    if not keys_are_set(api.options):
        raise AccessError(
            "invitations need an API key with the scope admin. Create one with mtp-coord key create NAME "
            "--scope admin, or run mtp-coord token create on the coordinator's machine"
        )
    if api.invite is None:
        raise NotReadyError("machines cannot join: start mtp-coord serve with --listen")
    return api.invite
