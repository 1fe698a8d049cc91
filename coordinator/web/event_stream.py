"""`GET /v1/events`: the live status as server-sent events."""

from __future__ import annotations

from typing import cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from coordinator.web.live_feed import LiveFeed

router = APIRouter()


def feed_of(request: Request) -> LiveFeed:
    """Return the feed of the app that received `request`."""
    return cast(LiveFeed, request.app.state.live_feed)


@router.get("/v1/events")
async def stream_events(request: Request) -> Response:
    """Stream one `snapshot` event, then `delta` events with what changed."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        feed_of(request).subscribe(), media_type="text/event-stream", headers=headers
    )
