"""The endpoints for operators and their tools: health, readiness, status, metrics, and a new plan."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.request.context import api_of
from coordinator.web.event_stream import feed_of
from proto.errors import NotReadyError, RequestError

open_router = APIRouter()
"""The routes for load balancers and supervisors, which need no key."""

router = APIRouter()


@open_router.get("/health")
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
    # Without this check a web page could send the request across sites, because a form needs no permission.
    if request.headers.get("content-type") != "application/json":
        raise RequestError("/replan: send the header Content-Type: application/json")
    request_plan = api_of(request).replan
    if request_plan is None:
        raise RequestError("/replan: this server runs in single-node mode and has no workers")
    request_plan()
    return JSONResponse({"status": "planning"}, status_code=202)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' format."""
    return Response(api_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)
