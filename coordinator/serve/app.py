"""The ASGI app: routers, keys and error handlers, joined, and the app of a server that has no model yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from fastapi import APIRouter, Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.answers.journal import Journal
from coordinator.answers.stored_answers import StoredAnswers
from coordinator.dialects import anthropic, embeddings, ollama, openai_chat, openai_responses
from coordinator.serve import operations
from coordinator.status.cluster_status import StatusSource
from coordinator.status.frame_records import FrameRecords
from coordinator.text.tokenizer import ModelInfo
from coordinator.web import live_feed
from coordinator.web.access import require_key
from coordinator.web.context import Api, ApiOptions
from coordinator.web.error_responses import ErrorFormat, error_body, install_error_handlers
from coordinator.web.live_feed import LiveFeed
from coordinator.web.model_catalog import ModelLoader
from proto.errors import NotReadyError

ERROR_FORMATS: dict[str, ErrorFormat] = {
    "/v1/messages": anthropic.anthropic_error,
    "/api/v1/": error_body,
    "/api/": ollama.ollama_error,
}
"""The error format of each path prefix, the first that matches; other paths use OpenAI's format."""


UNVERSIONED = (
    *("/chat/completions", "/completions", "/responses", "/messages", "/messages/count_tokens"),
    "/models",
    "/embeddings",
)
"""Paths that clients ask without `/v1`, because their users left it out of the server's address."""


def served_path(path: str) -> str:
    """Return the path that a client means: without a slash at the end, with `/v1`, and with one of them."""
    path = path.rstrip("/") or "/"
    while path.startswith("/v1/v1/"):
        path = path.removeprefix("/v1")
    unversioned = path in UNVERSIONED or path.startswith("/responses/")
    return f"/v1{path}" if unversioned else path


class ServedPaths:
    """An ASGI app in front of another one, which gets the path that the client means."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http" and (path := served_path(scope["path"])) != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


def create_app(api: Api, frames: FrameRecords | None = None, journal: Journal | None = None) -> FastAPI:
    """Return an ASGI app of one model. The page shows `frames`; without `journal` answers stay in memory."""
    routers = (
        openai_chat.router,
        operations.load_router,
        operations.models_router,
        openai_responses.router,
        anthropic.router,
        ollama.router,
        operations.router,
        operations.cluster_router,
        live_feed.router,
        *((embeddings.router,) if api.embedder else ()),
    )
    app = _new_app(api, routers, frames)
    app.state.stored_answers = StoredAnswers(api, journal or Journal(), openai_responses.restore)
    if api.options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(api.options.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _new_app(api: Api, routers: Sequence[APIRouter], frames: FrameRecords | None = None) -> FastAPI:
    # No generated pages: they would load scripts from other sites.
    app = FastAPI(title="mtp-cluster", openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(ServedPaths)
    app.state.api, metrics = api, api.metrics
    frames = frames or FrameRecords()
    feed = LiveFeed(api.status, metrics.latency, metrics.clock, frames, metrics.request_log)
    app.state.live_feed = feed
    for router in routers:
        app.include_router(router, dependencies=[Depends(require_key)])
    app.include_router(operations.open_router)
    app.router.routes += live_feed.page_routes
    install_error_handlers(app, ERROR_FORMATS)
    return app


def starting_app(
    status: StatusSource, options: ApiOptions, reason: str = "", loader: ModelLoader | None = None
) -> FastAPI:
    """Return an app of the page and the operators' endpoints. Others get 503 and `reason`, or the download's state."""

    def refuse() -> None:
        """Answer 503 with the state of the download."""
        detail = reason or f"The server is starting: {status.status().detail}."
        raise NotReadyError(f"{detail} Try again later.")

    absent = cast(Any, None)  # these endpoints use neither generator nor tokenizer
    api = Api(absent, absent, ModelInfo("", 0), status, options, model_loader=loader)
    app = _new_app(api, (operations.router, live_feed.router, operations.load_router))

    @app.api_route("/{path:path}", methods=["GET", "POST"], dependencies=[Depends(require_key)])
    async def refuse_all(request: Request) -> None:
        """Answer 503 to every other request."""
        refuse()

    return app
