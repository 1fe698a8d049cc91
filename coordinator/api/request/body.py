"""API keys, and request bodies with limits on size and time."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from coordinator.api.request.context import ApiOptions, api_of
from coordinator.api.request.errors import request_error
from coordinator.api.request.json_bounds import JsonBounds
from coordinator.api.request.large_work import LARGE_BYTES
from coordinator.trust.key_ring import Scope
from proto.errors import ClusterError


class Body(BaseModel):
    """A JSON object that rejects unknown fields and converts no types: `"1"` is not a number, `1` is not a boolean."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


B = TypeVar("B", bound=Body)
T = TypeVar("T")

Many = Annotated[list[T], Field(fail_fast=True)]
"""A list whose validation ends at the first error. A client could otherwise cause an error object for each byte."""

ADMIN_PATHS = frozenset({"/replan", "/trace", "/v1/models/load"})
ADMIN_PREFIX = "/v1/cluster/"
METRICS_PATHS = frozenset({"/metrics", "/status", "/v1/events"})
"""Paths that need another scope than inference."""


def keys_are_set(options: ApiOptions) -> bool:
    """Return whether requests need a key."""
    return bool(options.api_keys or (options.key_ring and options.key_ring.stored_keys()))


async def require_key(request: Request) -> AsyncIterator[None]:
    """Raise HTTPException 401 unless the request carries a valid key or no keys are set.

    Raises AccessError for a named key without the scope of the request, and CapacityError above a limit of the key.
    The request counts as open until its answer has ended.

    The key is in `Authorization: Bearer KEY` or, as Anthropic's clients send it, in `x-api-key`. Every key is
    compared, in constant time. `request.state.owner` becomes a digest of the valid key, and `request.state.key_name`
    the name of a named one.
    """
    options = api_of(request).options
    keys, ring = options.api_keys, options.key_ring
    if not keys_are_set(options):
        yield
        return
    content = _sent_key(request)
    request.state.owner = hashlib.sha256(b"owner of answers " + content).hexdigest()
    matches = [secrets.compare_digest(content, key.encode()) for key in keys]
    named = ring.find(content) if ring else None
    if any(matches):
        yield
    elif ring and named:
        request.state.key_name = named.name
        owner = request.state.owner if starts_answer(request) else ""
        with ring.open_request(named, scope_of(request.url.path), owner):
            yield
    else:
        raise HTTPException(
            401,
            "API key: missing or invalid. Send Authorization: Bearer KEY.",
            headers={"WWW-Authenticate": "Bearer"},
        )


def has_valid_key(request: Request, options: ApiOptions) -> bool:
    """Return whether the request has a key that permits inference, or no keys are set."""
    if not keys_are_set(options):
        return True
    content = _sent_key(request)
    matches = [secrets.compare_digest(content, key.encode()) for key in options.api_keys]
    named = options.key_ring.find(content) if options.key_ring else None
    return any(matches) or (named is not None and Scope.INFERENCE in named.scopes)


def _sent_key(request: Request) -> bytes:
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    sent = credentials if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    return sent.strip().encode("latin-1")  # headers are bytes that Starlette decodes as Latin-1


def starts_answer(request: Request) -> bool:
    """Return whether a request may start an answer. Other requests read, continue or cancel a stored one."""
    continues = "last-event-id" in request.headers
    return request.method == "POST" and not continues and not request.url.path.endswith("/cancel")


def scope_of(path: str) -> Scope:
    """Return the scope that a request for `path` needs."""
    if path in ADMIN_PATHS or path.startswith(ADMIN_PREFIX):
        return Scope.ADMIN
    return Scope.METRICS if path in METRICS_PATHS else Scope.INFERENCE


async def read_body(request: Request, kind: type[B]) -> B:
    """Return the request's JSON body as a `kind`.

    Raises RequestError for invalid content, HTTPException 413 for a body that is too large and 408 for one that is
    too slow.
    """
    api = api_of(request)
    options, context = api.options, api.model.context_length
    with api.large_work.reading() as reserve:
        try:
            async with asyncio.timeout(options.body_seconds):
                content = await _read_bytes(
                    request, options.max_body_bytes, JsonBounds(context), reserve
                )
        except TimeoutError:
            raise HTTPException(
                408, f"request body: not complete after {options.body_seconds:g} s. Send it faster."
            ) from None
        except ClientDisconnect:
            raise HTTPException(
                400, "request body: the client disconnected while sending"
            ) from None
        if len(content) <= LARGE_BYTES:
            return parse_body(kind, content)
        return await api.large_work.run(len(content), partial(parse_body, kind, content))


def parse_body(kind: type[B], content: bytes | bytearray) -> B:
    """Return `content` as a `kind`. Raises RequestError for invalid content."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise request_error(error) from error


async def _read_bytes(
    request: Request, limit: int, bounds: JsonBounds, reserve: Callable[[int], None]
) -> bytearray:
    """Return the body. `bounds` counts its values, and `reserve` is called for the bytes of a large one.

    A body that one of them refuses is read to its end, because most clients read no answer before.
    """
    content, size, refusal = bytearray(), 0, None
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise HTTPException(413, f"request body: exceeds {limit} bytes. Send a shorter one.")
        if refusal is not None:
            continue
        try:
            bounds.add_part(chunk)
            if size > LARGE_BYTES:
                reserve(len(chunk))
            content += chunk
        except ClusterError as error:
            refusal = error
            content.clear()
    if refusal is not None:
        raise refusal
    return content
