"""The HTTP app of a server that has no model yet, and the switch to the app that serves it."""

from __future__ import annotations

from typing import Any, cast

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.api import health
from coordinator.api.openai_chat import models
from coordinator.api.request.body import require_key
from coordinator.api.request.context import Api, ApiOptions
from coordinator.api.request.errors import install_error_handlers
from coordinator.models.loader import ModelLoader
from coordinator.status.cluster_status import StatusSource
from coordinator.status.metrics import Metrics
from coordinator.web import event_stream
from coordinator.web.assets import page_routes
from coordinator.web.live_feed import LiveFeed
from proto.errors import NotReadyError


class SwitchedApp:
    """An ASGI app that forwards each request to `app`, which may be replaced while the server runs."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request."""
        await self.app(scope, receive, send)


def starting_app(
    status: StatusSource,
    options: ApiOptions,
    reason: str = "",
    loader: ModelLoader | None = None,
) -> FastAPI:
    """Return an app with the page and the operators' endpoints. It answers every other request with status 503.

    `reason` is the message of that answer; without it, the state of the download. `loader` changes the model.
    """
    app = FastAPI(title="mtp-cluster", openapi_url=None, docs_url=None, redoc_url=None)
    absent = cast(Any, None)  # these endpoints use neither generator, tokenizer nor model
    metrics = Metrics(status)
    app.state.api = Api(absent, absent, absent, status, options, metrics, model_loader=loader)
    app.state.live_feed = LiveFeed(status, metrics.latency, metrics.clock)
    for router in (health.router, event_stream.router, models.load_router):
        app.include_router(router, dependencies=[Depends(require_key)])
    app.include_router(health.open_router)
    app.router.routes += page_routes

    @app.api_route("/{path:path}", methods=["GET", "POST"], dependencies=[Depends(require_key)])
    async def refuse(request: Request) -> None:
        """Answer 503 with the state of the download."""
        detail = reason or f"The server is starting: {status.status().detail}."
        raise NotReadyError(f"{detail} Try again later.")

    install_error_handlers(app)
    return app
