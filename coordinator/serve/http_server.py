"""The HTTP server: connections with deadlines, the check of the Host header, and an end that clients see."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from proto.rpc.listener import Acceptor

log = logging.getLogger(__name__)

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+)(?::\d{1,5})?")
"""A name or address, and a port."""

CONTAINER_NAMES = ("host.docker.internal", "host.containers.internal")
"""Names of this machine in its containers. The domain `internal` is reserved: no website can have a name in it."""


class HostCheck:
    """An ASGI app that forwards requests for known hosts to `app` and refuses others with status 421.

    `app` may be replaced. IP addresses, `localhost`, CONTAINER_NAMES, this machine's `name` and those in `allowed` are
    known. Browsers send the name that the page was opened with, and that of a foreign page is foreign.
    """

    def __init__(self, app: ASGIApp, name: str, allowed: Sequence[str] = ()) -> None:
        self.app = app
        name = name.lower()
        short = name.partition(".")[0]
        own = {"localhost", name, short, f"{short}.local", *CONTAINER_NAMES}
        self._allowed = own | {host.lower().rstrip(".") for host in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self.is_known(host := _host(scope)):
            text = f"Host: {host!r:.100} is no known name of this server. Use its IP address, or start it with "
            text += "mtp-coord serve --allowed-host NAME.\n"
            await PlainTextResponse(text, status_code=421)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def is_known(self, header: str) -> bool:
        """Return whether the Host header `header` names this server. Requests without one are not from browsers."""
        match = _HOST.fullmatch(header)
        if match is None:
            return not header
        bare = match[1].removeprefix("[").removesuffix("]").lower().rstrip(".")
        if bare in self._allowed:
            return True
        try:
            ipaddress.ip_address(bare)
        except ValueError:
            return False
        return True


def _host(scope: Scope) -> str:
    values: list[bytes] = [value for name, value in scope["headers"] if name == b"host"]
    return values[0].decode("latin-1") if len(values) == 1 else "" if not values else "several"


HEAD_SECONDS = 20.0
"""Seconds. Maximum time without a complete request head, from the connection or the last answer on."""

STALL_SECONDS = 30.0
"""Seconds. Maximum time in which a client takes no byte of a full send buffer. A lost client does the same."""

MAX_CONNECTIONS = 1024
"""Connections. Bounds their memory, about 20 KB each. Each answer needs one, and so does each open page."""


def connection_limit() -> int:
    """Return the maximum number of connections. Half of the open files stay free for workers and the model."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


class HttpConnection(H11Protocol):
    """A connection whose client must send its heads and read its answers in time. uvicorn has no setting for either."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection."""
        super().connection_made(transport)
        self._start_deadline(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._start_deadline(HEAD_SECONDS)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Begin to watch a client that does not read."""
        super().pause_writing()
        self._start_deadline(STALL_SECONDS)

    def _start_deadline(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        unsent = self.transport.get_write_buffer_size()
        self._deadline = self.loop.call_later(seconds, self._check_progress, unsent)

    def _check_progress(self, before: int) -> None:
        """End a connection whose client sent no complete head, or took none of the `before` bytes to send."""
        unsent = self.transport.get_write_buffer_size()
        # uvicorn's annotation omits the None before the first request
        is_idle = self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]
        if 0 < unsent < before:
            self._start_deadline(STALL_SECONDS)
        elif is_idle or self.flow.write_paused:
            self.transport.abort()


GRACE_SECONDS = 5
"""Seconds. Maximum time for open answers to finish after SIGTERM."""

END_SECONDS = 5
"""Seconds. Maximum time for clients to receive the error event after `GRACE_SECONDS`."""

HANDSHAKE_SECONDS = 10.0
"""Seconds. Maximum time of a TLS handshake."""


class HttpServer(uvicorn.Server):
    """A uvicorn server that ends pages at once, and late answers after `GRACE_SECONDS` instead of connections."""

    def __init__(
        self,
        app: ASGIApp,
        end_answers: Callable[[], Awaitable[None]],
        end_pages: Callable[[], None],
        count_answers: Callable[[], int],
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",  # strangers would fill the disk with warnings about invalid requests
            access_log=False,
            lifespan="off",
            limit_concurrency=connection_limit(),
            timeout_graceful_shutdown=GRACE_SECONDS + END_SECONDS,
        )
        super().__init__(config)
        self.interrupted = False
        """True after Ctrl-C."""
        self._end_answers = end_answers
        self._end_pages = end_pages
        self._count_answers = count_answers
        self._acceptors: list[Acceptor] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGTERM and Ctrl-C. uvicorn's handler would raise the signal again before workers are released."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handle_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _handle_signal(self, number: signal.Signals) -> None:
        self.interrupted |= number is signal.SIGINT
        count = self._count_answers()
        if count and not self.should_exit:
            answers = f"{count} answer{'s' * (count > 1)}"
            log.info("ending %s within %d s; again to stop", answers, GRACE_SECONDS)
        self.handle_exit(number, None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`. uvicorn has no setting for the time and the number of handshakes, of 256 KB each."""
        await super().startup([])
        state = self.server_state, self.lifespan.state
        connect = partial(
            asyncio.get_running_loop().connect_accepted_socket,
            partial(HttpConnection, self.config, *state),
            ssl=self.config.ssl,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if self.config.ssl else None,
        )
        self._acceptors = [Acceptor(each, connect, "connections") for each in sockets or []]
        for acceptor in self._acceptors:
            acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn.Server does, and end late answers meanwhile."""
        self._end_pages()
        for acceptor in self._acceptors:
            await acceptor.close()
        ending = asyncio.create_task(self._end_late_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_late_answers(self) -> None:
        await asyncio.sleep(GRACE_SECONDS)
        await self._end_answers()
