"""The page: its files with a strict content security policy, and the event stream that keeps it up to date."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import cast

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from coordinator.web.live_feed import LiveFeed

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media types by suffix. A file with another suffix is not served."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The content security policy. With `trusted-types 'none'` no script can turn text into HTML."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}
"""Headers of every file. `no-cache` makes a browser ask again after an update; an unchanged file costs a 304."""


@dataclass(frozen=True)
class Asset:
    """One file: its bytes, its media type, and the ETag of its content."""

    content: bytes
    media_type: str
    etag: str


@cache
def load_assets() -> dict[str, Asset]:
    """Return the files of the page by name."""
    folder = resources.files("coordinator.web") / "assets"
    found = {}
    for file in folder.iterdir():
        media_type = MEDIA_TYPES.get(file.name[file.name.rfind(".") :])
        if media_type is not None:
            content = file.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            found[file.name] = Asset(content, media_type, etag)
    return found


async def send_asset(request: Request) -> Response:
    """Answer `GET /` or `GET /assets/NAME`, with 304 if the browser has the file. Raises HTTPException 404."""
    asset = load_assets().get(request.path_params.get("name", "index.html"))
    if asset is None:
        raise HTTPException(404, "page file: not found")
    headers = {**HEADERS, "ETag": asset.etag}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)


page_routes = [Route("/", send_asset), Route("/assets/{name}", send_asset)]
"""The routes of the files. They need no API key, because a browser cannot send one when it opens a page."""

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
