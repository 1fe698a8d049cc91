"""The check of the Host header, against web pages that reach this server by a name of their own (DNS rebinding)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+)(?::\d{1,5})?")
"""A name or address, and a port."""


class HostCheck:
    """An ASGI app that forwards requests for known hosts to `app` and refuses others with status 421.

    IP addresses and `localhost` are known, this machine's `name`, and the names in `allowed`. Browsers send the name
    that the page was opened with, so a foreign page that resolves to this machine has a foreign name.
    """

    def __init__(self, app: ASGIApp, name: str, allowed: Sequence[str] = ()) -> None:
        self.app = app
        name = name.lower()
        short = name.partition(".")[0]
        own = {"localhost", name, short, f"{short}.local"}
        self._allowed = own | {host.lower().rstrip(".") for host in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward or refuse one request."""
        if scope["type"] == "http" and not self.is_known(_host(scope)):
            text = "Host: unknown name of this server. Use its IP address, or start it with --allowed-host NAME.\n"
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
