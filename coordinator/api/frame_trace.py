"""The endpoint of the frame trace."""

from __future__ import annotations

import math

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.request.context import api_of
from proto.errors import NotReadyError, RequestError

router = APIRouter()

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
