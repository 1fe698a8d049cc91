"""The app: routers, keys, errors, joined. Follow a request from chat.py or completions.py through delivery.py."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware

from coordinator.api import chat, completions, errors, health, models
from coordinator.api.body import require_key
from coordinator.api.context import Api, ApiOptions
from coordinator.generation.request import Generator
from coordinator.status.cluster_status import StatusSource
from coordinator.status.metrics import Metrics
from coordinator.text.model_info import ModelInfo
from coordinator.text.tokenizer import Tokenizer


def create_app(
    generator: Generator,
    tokenizer: Tokenizer,
    model: ModelInfo,
    status: StatusSource,
    options: ApiOptions | None = None,
    replan: Callable[[], None] | None = None,
) -> FastAPI:
    """An ASGI app that serves one model. It starts and stops nothing: its parts belong to the caller.

    `replan` asks the cluster for a new plan; None where there is no cluster.
    """
    options = options or ApiOptions()
    # No generated pages: they would load scripts from elsewhere, and bodies are checked by our own hand.
    app = FastAPI(title="mtp-cluster", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.api = Api(generator, tokenizer, model, status, options, Metrics(status), replan)
    for router in (chat.router, completions.router, models.router, health.router):
        app.include_router(router, dependencies=[Depends(require_key)])
    app.include_router(health.open_router)
    errors.install(app)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app
