"""Who may send a body, how large it may be, and how long that may take."""

from __future__ import annotations

import asyncio
import secrets
from typing import TypeVar

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from coordinator.api.context import api_of
from coordinator.api.errors import request_error
from coordinator.api.schemas import Body

B = TypeVar("B", bound=Body)


async def require_key(request: Request) -> None:
    """Let the request pass when no keys are set, or it bears one. Every key is compared, in constant time."""
    keys = api_of(request).options.api_keys
    if not keys:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip().encode("latin-1")  # headers are bytes, which Starlette reads as Latin-1
    matches = [secrets.compare_digest(sent, key.encode()) for key in keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise HTTPException(
            401,
            "send a valid key: Authorization: Bearer KEY",
            headers={"WWW-Authenticate": "Bearer"},
        )


async def read_body(request: Request, kind: type[B]) -> B:
    """The request's JSON body as a `kind`.

    Raises RequestError for what is wrong in it, HTTPException 413 when it is too large, 408 when it takes too long.
    """
    options = api_of(request).options
    try:
        async with asyncio.timeout(options.body_seconds):
            content = await _read(request, options.max_body_bytes)
    except TimeoutError:
        raise HTTPException(408, f"the body took longer than {options.body_seconds:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the client left before its body was complete") from None
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise request_error(error) from error


async def _read(request: Request, limit: int) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > limit:
            raise HTTPException(413, f"the body is larger than {limit} bytes")
    return bytes(content)
