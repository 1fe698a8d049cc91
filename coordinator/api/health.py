"""What operators and their tools ask: does it live, does it serve, how does it do."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.context import api_of
from proto.errors import NotReadyError, RequestError

open_router = APIRouter()
"""For load balancers and supervisors, which have no key and learn nothing but yes or no."""

router = APIRouter()


@open_router.get("/health")
async def health() -> Response:
    """The process answers. It may not serve yet: see /ready."""
    return JSONResponse({"status": "ok"})


@open_router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while a plan is serving, 503 with Retry-After otherwise."""
    if not api_of(request).status.status().ready:
        raise NotReadyError("no plan is serving yet")
    return JSONResponse({"status": "ready"})


@router.get("/status")
async def status(request: Request) -> Response:
    """The whole cluster, as `coordinator.status.cluster_status` describes it."""
    return JSONResponse(asdict(api_of(request).status.status()))


@router.post("/replan")
async def replan(request: Request) -> Response:
    """Plan anew over the workers there are. Open answers pause while layers move, and go on."""
    # What a page in some browser may send here without asking is no JSON.
    if request.headers.get("content-type") != "application/json":
        raise RequestError("POST /replan with Content-Type: application/json")
    ask = api_of(request).replan
    if ask is None:
        raise RequestError("this server runs alone by choice: there is nothing to plan anew")
    ask()
    return JSONResponse({"status": "planning"}, status_code=202)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(api_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)
