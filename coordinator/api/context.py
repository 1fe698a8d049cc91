"""What every handler has at hand: the engine behind the API, and how the API was told to behave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request

from coordinator.generation.request import Generator
from coordinator.status.cluster_status import StatusSource
from coordinator.status.metrics import Metrics
from coordinator.text.model_info import ModelInfo
from coordinator.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ApiOptions:
    """How the API behaves. Seconds and bytes.

    With `api_keys` every request but `/health` and `/ready` needs one as a bearer token. `allowed_origins` are the web
    pages that may call from a browser; none by default. An answer with no `max_tokens` ends at
    `default_max_tokens`, the context's end or that of the K/V memory, whichever comes first.
    """

    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    default_max_tokens: int = 8192
    keep_alive_seconds: float = 10.0
    max_body_bytes: int = 16 * 2**20
    body_seconds: float = 30.0

    def __post_init__(self) -> None:
        assert self.keep_alive_seconds > 0
        assert self.default_max_tokens > 0
        assert all(self.api_keys), "an empty key would let everybody in"


@dataclass(frozen=True)
class Api:
    """One app's parts."""

    generator: Generator
    tokenizer: Tokenizer
    model: ModelInfo
    status: StatusSource
    options: ApiOptions
    metrics: Metrics
    replan: Callable[[], None] | None = None


def api_of(request: Request) -> Api:
    """The parts behind the app a request came to."""
    return cast(Api, request.app.state.api)
