"""The parts behind the app and the options of the API, which every handler uses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from starlette.requests import Request

from coordinator.api.request.hints import HintLog
from coordinator.api.request.large_work import LargeWork
from coordinator.generation.request import Generator
from coordinator.models.admin import ModelAdmin
from coordinator.models.loader import ModelLoader
from coordinator.status.cluster_status import StatusSource
from coordinator.status.metrics import Metrics
from coordinator.text.model_info import ModelInfo
from coordinator.text.output_format import GrammarCompiler
from coordinator.text.tokenizer import Tokenizer
from coordinator.trust.invitation import Invitation
from coordinator.trust.key_ring import KeyRing

CollectTrace = Callable[[float], Awaitable[dict[str, Any]]]
"""A function that returns the answer of `/trace` for the last seconds."""


@dataclass(frozen=True)
class ApiOptions:
    """The options of the API, in seconds and bytes.

    With `api_keys` every request except `/health` and `/ready` requires one of them. Web pages of
    `allowed_origins` may call the API from a browser; by default none may. A request without `max_tokens` gets at
    most `default_max_tokens`, limited by the context and the K/V memory. With `clamp_max_tokens` a larger
    `max_tokens` of the client is lowered to what fits; otherwise it is an error.
    """

    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    default_max_tokens: int = 8192
    keep_alive_seconds: float = 10.0
    max_body_bytes: int = 16 * 2**20
    body_seconds: float = 30.0
    clamp_max_tokens: bool = False
    key_ring: KeyRing | None = None
    """The named keys. If there are any, every request requires one of them or one of `api_keys`."""

    def __post_init__(self) -> None:
        assert self.keep_alive_seconds > 0
        assert self.default_max_tokens > 0
        assert all(self.api_keys), "an empty key would admit every client"


@dataclass(frozen=True)
class Api:
    """The parts of one app."""

    generator: Generator
    tokenizer: Tokenizer
    model: ModelInfo
    status: StatusSource
    options: ApiOptions
    metrics: Metrics
    replan: Callable[[], None] | None = None
    collect_trace: CollectTrace | None = None
    model_admin: ModelAdmin | None = None
    model_loader: ModelLoader | None = None
    invite: Callable[[], Invitation] | None = None
    """A function that makes an invitation for a machine; None if machines cannot join."""
    hints: HintLog = field(default_factory=HintLog)
    large_work: LargeWork = field(default_factory=LargeWork)

    @cached_property
    def compiler(self) -> GrammarCompiler:
        """Return the compiler of output formats."""
        return GrammarCompiler(self.tokenizer)


def api_of(request: Request) -> Api:
    """Return the parts behind the app that received `request`."""
    return cast(Api, request.app.state.api)
