"""The parts of one app that its handlers use, and the options of the API."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

from starlette.requests import Request

from coordinator.images.encoder import ImageEncoder
from coordinator.schedule.request import Generator
from coordinator.status.cluster_status import StatusSource
from coordinator.status.metrics import Metrics
from coordinator.text.embedder import Embedder
from coordinator.text.grammars import GrammarProcess
from coordinator.text.tokenizer import ModelInfo, Tokenizer, pack_vocabulary
from coordinator.trust.client_access import ClientAccess, Invitation
from coordinator.trust.keys import KeyRing
from coordinator.web.model_catalog import ModelFacts, ModelLoader
from proto.announcement import is_loopback
from proto.errors import CapacityError

log = logging.getLogger(__name__)

R = TypeVar("R")

LARGE_BYTES = 2**16
"""Bytes or characters. The thread for large requests works on longer ones, which take over a few milliseconds."""

MAX_OPEN_BYTES = 128 * 2**20
"""Bytes of large bodies that are read at once: eight of the largest. Parsed, they take about twice as much."""

RETRY_SECONDS = 5.0
"""Seconds after which a client may send a large body again. Reading eight of them takes about as long."""


class LargeWork:
    """The thread for large requests, and the bytes that it reads. One thread bounds memory and processor time."""

    def __init__(self) -> None:
        self.open_bytes = 0
        self._thread = ThreadPoolExecutor(1, "large request")

    async def run(self, size: int, function: Callable[[], R]) -> R:
        """Return the result of `function`, which works on `size` bytes or characters, from a thread."""
        if size <= LARGE_BYTES:
            return await asyncio.to_thread(function)
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes until the block ends, or raises CapacityError above MAX_OPEN_BYTES."""
        reserved = 0

        def reserve(count: int) -> None:
            nonlocal reserved
            if self.open_bytes + count > MAX_OPEN_BYTES:
                raise CapacityError(
                    "The server is reading other large requests. Try again later.",
                    retry_after=RETRY_SECONDS,
                )
            self.open_bytes += count
            reserved += count

        try:
            yield reserve
        finally:
            self.open_bytes -= reserved


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
    keep_alive_seconds: float = 5.0
    """Seconds without data after which a stream has a sign of life. Clients have watchdogs from 6 s on."""
    max_body_bytes: int = 16 * 2**20
    body_seconds: float = 30.0
    clamp_max_tokens: bool = False
    strict_names: bool = True
    """Refuse names of models that are not served."""
    max_images: int = 32
    """Images of one request."""
    clients: ClientAccess | None = None
    """The admission of clients on other machines; None without a certificate of the cluster."""
    key_ring: KeyRing | None = None
    """The named keys. Once there was one, every request requires one of them or one of `api_keys`."""

    @property
    def needs_key(self) -> bool:
        """True if requests need a key."""
        ring = self.key_ring
        return bool(self.api_keys or (ring and (ring.stored_keys() or ring.required)))

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
    options: ApiOptions = field(default_factory=ApiOptions)
    collect_trace: CollectTrace | None = None
    model_loader: ModelLoader | None = None
    invite: Callable[[], Invitation] | None = None
    """A function that makes an invitation for a machine; None if machines cannot join."""
    large_work: LargeWork = field(default_factory=LargeWork)
    vocabulary: bytes = b""
    """The packed vocabulary of the tokenizer, if it is known already."""
    images: ImageEncoder = field(default_factory=ImageEncoder)
    embedder: Embedder | None = None

    @property
    def served_models(self) -> tuple[ModelInfo, ...]:
        """The model of answers, and that of embeddings if there is one."""
        return (self.model, self.embedder.info) if self.embedder else (self.model,)

    async def loadable_models(self) -> list[ModelFacts]:
        """Return the other models on this machine that can be served."""
        found = [] if self.model_loader is None else await self.model_loader.list_models()
        served = [name for model in self.served_models for name in model.listed_names]
        return [m for m in found if not m.problem and m.name not in served]

    @cached_property
    def metrics(self) -> Metrics:
        """Return the metrics of the app."""
        return Metrics(self.status)

    @cached_property
    def compiler(self) -> GrammarProcess:
        """Return the compiler of output formats."""
        return GrammarProcess(self.vocabulary or pack_vocabulary(self.tokenizer))


def api_of(request: Request) -> Api:
    """Return the parts behind the app that received `request`."""
    return cast(Api, request.app.state.api)


def client_of(request: Request) -> str:
    """Return the name of the request's API key, else its address. Keys of `--api-key` have no name."""
    if name := getattr(request.state, "key_name", ""):
        return f"key {name}"
    return "" if request.client is None else f"address {request.client.host}"


PROGRAM = re.compile(r"[\w.+-]{1,40}(/[a-z][\w.-]{0,40})?", re.ASCII | re.IGNORECASE)
"""The name of a program in `User-Agent`, such as `claude-cli` or `OpenAI/Python`, without its version."""


def describe_client(request: Request) -> str:
    """Return for people the program of a request, and its key's name or its address on another machine."""
    found = PROGRAM.match(request.headers.get("user-agent", ""))
    program = found[0].replace("Mozilla", "browser") if found else ""
    host = request.client.host if request.client else ""
    who = getattr(request.state, "key_name", "") or ("" if is_loopback(host) else host)
    return ", ".join(filter(None, (program, who)))
