"""Errors as OpenAI's clients expect them: one body, one place where a status is chosen, no path ever."""

from __future__ import annotations

import math
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.schemas import FIELD
from proto.errors import CapacityError, ClusterError, NotReadyError, RequestError

RETRY_SECONDS = 5.0
"""What a client is told to wait while no plan serves: about the time one needs to be made anew."""


class ContextLengthError(RequestError):
    """The prompt, or prompt and answer together, exceed the model's context."""


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    http_status = 404


def error_body(error: Exception) -> dict[str, Any]:
    """The `{"error": …}` object for any exception. Of ours only `.public` is told, of others nothing."""
    if isinstance(error, ClusterError):
        status, message = error.http_status, error.public
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    else:
        status, message = 500, "the server made an error; its log has it"
    return {
        "error": {
            "message": message,
            "type": _kind(status),
            "param": error.param if isinstance(error, RequestError) else None,
            "code": _code(error, status),
        }
    }


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _code(error: Exception, status: int) -> str | None:
    if isinstance(error, ContextLengthError):
        return "context_length_exceeded"
    if isinstance(error, UnknownModelError):
        return "model_not_found"
    return {401: "invalid_api_key", 429: "server_full", 503: "not_ready"}.get(status)


def error_response(error: Exception) -> JSONResponse:
    """The whole HTTP response for any exception, with Retry-After where waiting helps."""
    headers: dict[str, str] = {}
    status = 500
    if isinstance(error, ClusterError):
        status = error.http_status
    elif isinstance(error, HTTPException):
        status = error.status_code
        headers.update(error.headers or {})
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, NotReadyError):
        headers["Retry-After"] = str(math.ceil(RETRY_SECONDS))
    return JSONResponse(error_body(error), status, headers)


def request_error(error: ValidationError) -> RequestError:
    """What pydantic found, as one of our errors: the first finding, by the name the client wrote."""
    found = error.errors(include_url=False, include_input=False)[0]
    where = found["loc"]
    if found["type"] == FIELD:
        where = (*where, found["ctx"]["field"])
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)[1:]
    if found["type"] == "extra_forbidden":
        return RequestError(f"{name} has no effect on this server: leave it out", param=name)
    if found["type"] == "json_invalid":
        return RequestError(f"the body is not JSON: {found['ctx']['error']}")
    message = found["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return RequestError(f"{name}: {message}" if name else message, param=name or None)


def install(app: FastAPI) -> None:
    """Answer every exception of a handler in this shape."""

    async def answer(request: Request, error: Exception) -> Response:
        return error_response(error)

    # The last is for our own mistakes: Starlette raises it again after answering, and the server logs it.
    for kind in (ClusterError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
