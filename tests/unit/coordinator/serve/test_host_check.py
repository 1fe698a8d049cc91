"""The check of the Host header."""

from __future__ import annotations

import httpx
import pytest
from starlette.responses import PlainTextResponse

from coordinator.serve.http_server import HostCheck


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("localhost:8080", True),
        ("mac-1.local:8080", True),
        ("chat.example", True),
        ("host.docker.internal:8080", True),
        ("Host.Containers.Internal.:8080", True),
        ("evil.example:8080", False),
        ("evil.internal:8080", False),
        ("host.docker.internal.evil.example", False),
        ("host.docker.internal:8080@evil.example", False),
    ],
)
async def test_the_names_of_this_server_are_known(host: str, known: bool) -> None:
    """Its addresses and names are served, those for containers too. The answer to others names --allowed-host."""
    app = HostCheck(PlainTextResponse("served"), "mac-1.lan", ("chat.example",))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.get("/", headers={"Host": host})
    if known:
        assert reply.text == "served"
    else:
        assert reply.status_code == 421
        assert host in reply.text
        assert "mtp-coord serve --allowed-host NAME" in reply.text
