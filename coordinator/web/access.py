"""The access to the API: keys, their scopes, and web pages of other sites."""

from __future__ import annotations

import hashlib
import secrets

from starlette.exceptions import HTTPException
from starlette.requests import Request

from coordinator.trust.keys import Scope
from coordinator.web.context import api_of
from proto.errors import AccessError

ADMIN_PATHS = frozenset({"/trace", "/v1/models/load"})
ADMIN_PREFIX = "/v1/cluster/"
METRICS_PATHS = frozenset({"/metrics", "/status", "/v1/events"})
"""Paths that need another scope than inference."""


async def require_key(request: Request) -> None:
    """Raise HTTPException 401 unless the request carries a valid key or no keys are set.

    The key is in `Authorization: Bearer KEY` or, as Anthropic's clients send it, in `x-api-key`. Every key is compared,
    in constant time. `request.state` gets a digest as `owner`, and the `key_name` of a named key. Raises AccessError
    for a named key without the scope of the request, and for a web page of another site.
    """
    check_origin(request)
    options = api_of(request).options
    ring = options.key_ring
    if not options.needs_key:
        return
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    sent = credentials if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    content = sent.strip().encode("latin-1")  # headers are bytes that Starlette decodes as Latin-1
    request.state.owner = hashlib.sha256(b"owner of answers " + content).hexdigest()
    matches = [secrets.compare_digest(content, key.encode()) for key in options.api_keys]
    named = ring.find(content) if ring else None
    if any(matches):
        return
    if ring is None or named is None:
        text = "API key: missing or invalid. Send Authorization: Bearer KEY."
        raise HTTPException(401, text, headers={"WWW-Authenticate": "Bearer"})
    request.state.key_name = named.name
    ring.check_scope(named, scope_of(request.url.path))


def scope_of(path: str) -> Scope:
    """Return the scope that a request for `path` needs."""
    if path in ADMIN_PATHS or path.startswith(ADMIN_PREFIX):
        return Scope.ADMIN
    return Scope.METRICS if path in METRICS_PATHS else Scope.INFERENCE


def check_origin(request: Request) -> None:
    """Raise AccessError for a request that a web page of another site sends, unless the user allowed its origin.

    Images and frames of a page send no origin, but the relation of the sites. A link that the user follows is allowed.
    """
    headers, allowed = request.headers, api_of(request).options.allowed_origins
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    if not {origin, "*"}.isdisjoint(allowed):
        return
    if origin is None:
        own = site in ("same-origin", "none") or headers.get("sec-fetch-dest") == "document"
    else:
        own = origin.partition("://")[2] == headers.get("host")
    if not own:
        raise AccessError(
            f"Origin: web pages of {origin or site!r:.100} may not call this server. Allow them with --allowed-origins."
        )
