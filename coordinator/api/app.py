"""The ASGI app: routers, keys and error handlers, joined. A request starts in the router of its dialect."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from coordinator.api import cluster_models, frame_trace, health
from coordinator.api.anthropic import messages
from coordinator.api.anthropic.errors import anthropic_error
from coordinator.api.ollama import answers as ollama_answers
from coordinator.api.ollama import models as ollama_models
from coordinator.api.ollama.errors import ollama_error
from coordinator.api.openai_chat import chat, completions, models, stored_chats
from coordinator.api.openai_responses import responses
from coordinator.api.request.body import require_key
from coordinator.api.request.context import Api, ApiOptions, CollectTrace
from coordinator.api.request.errors import ErrorFormat, error_body, install_error_handlers
from coordinator.api.stored.stored_answers import Restore, StoredAnswers
from coordinator.generation.request import Generator
from coordinator.journal.journal import Journal
from coordinator.models.admin import ModelAdmin
from coordinator.models.loader import ModelLoader
from coordinator.status.cluster_status import StatusSource
from coordinator.status.frame_history import FrameHistory
from coordinator.status.metrics import Metrics
from coordinator.text.model_info import ModelInfo
from coordinator.text.tokenizer import Tokenizer
from coordinator.trust.invitation import Invitation
from coordinator.web import event_stream
from coordinator.web.assets import page_routes
from coordinator.web.live_feed import LiveFeed

ERROR_FORMATS: dict[str, ErrorFormat] = {
    "/v1/messages": anthropic_error,
    "/api/v1/": error_body,
    "/api/": ollama_error,
}
"""The error format of each path prefix, the first that matches; other paths use OpenAI's format."""

RESTORE: dict[str, Restore] = {
    stored_chats.DIALECT: chat.restore,
    responses.DIALECT: responses.restore,
}
"""The dialects with stored answers."""


def create_app(
    generator: Generator,
    tokenizer: Tokenizer,
    model: ModelInfo,
    status: StatusSource,
    options: ApiOptions | None = None,
    replan: Callable[[], None] | None = None,
    frames: FrameHistory | None = None,
    collect_trace: CollectTrace | None = None,
    model_admin: ModelAdmin | None = None,
    model_loader: ModelLoader | None = None,
    invite: Callable[[], Invitation] | None = None,
    journal: Journal | None = None,
) -> FastAPI:
    """Return an ASGI app that serves one model. The caller starts and stops the parts.

    `replan` requests a new plan from the cluster; it is None without a cluster. `frames` is what the page's timeline
    shows. `collect_trace` returns the answer of `/trace`. Without `journal` stored answers are kept in memory.
    """
    options = options or ApiOptions()
    # No generated pages: they would load scripts from other sites.
    app = FastAPI(title="mtp-cluster", openapi_url=None, docs_url=None, redoc_url=None)
    metrics = Metrics(status)
    app.state.api = api = Api(
        generator,
        tokenizer,
        model,
        status,
        options,
        metrics,
        replan,
        collect_trace,
        model_admin,
        model_loader,
        invite,
    )
    app.state.stored_answers = StoredAnswers(api, journal or Journal(), RESTORE)
    app.state.live_feed = LiveFeed(
        status, metrics.latency, metrics.clock, frames, metrics.request_log
    )
    routers = (
        chat.router,
        completions.router,
        stored_chats.router,
        models.load_router,
        models.router,
        responses.router,
        messages.router,
        ollama_answers.router,
        ollama_models.router,
        health.router,
        event_stream.router,
        frame_trace.router,
        cluster_models.router,
    )
    for router in routers:
        app.include_router(router, dependencies=[Depends(require_key)])
    app.include_router(ollama_models.refusals, dependencies=[Depends(require_key)])
    app.include_router(health.open_router)
    app.router.routes += page_routes
    install_error_handlers(app, _paths_of(*routers, health.open_router), ERROR_FORMATS)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _paths_of(*routers: APIRouter) -> list[str]:
    """Return the paths of `routers` that have no parameters."""
    routes = [route for router in routers for route in router.routes]
    return [route.path for route in routes if isinstance(route, Route) and "{" not in route.path]
