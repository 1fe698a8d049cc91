"""Errors as HTTP responses, in the format of each dialect."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.text.schemas import Json
from proto.errors import CapacityError, ClusterError, NotReadyError, RequestError

RETRY_SECONDS = 5.0
"""Seconds. `Retry-After` while no plan is serving: about the time the cluster needs to make a plan."""

FIELD = "field"
"""The type of a pydantic error of a whole object that one field causes. Its context names the field."""

_TYPE = re.compile(r"(str|int|float|bool|[A-Z]\w*)$|[a-z-]*\[|constrained-")
"""The names of types that pydantic puts into the path of an error in a field of several types."""

MAX_NAME = 100
"""Characters. Bounds the path of a field in an error, which may hold a key of the client."""

ErrorFormat = Callable[[Exception], Json]
"""A function that returns the error body of a dialect."""


class UnknownModelError(RequestError, http=404):
    """The request names a model that this server does not serve."""

    code = "model_not_found"


class ModelNotLoadedError(RequestError, http=409):
    """The request names a model that is on this machine and not loaded."""

    code = "model_not_loaded"


def field_error(field: str, problem: str) -> PydanticCustomError:
    """Return the error for a validator of a whole object to raise when `field` is the cause."""
    return PydanticCustomError(FIELD, "{problem}", {"field": field, "problem": problem})


def refused_field(param: str, problem: str) -> RequestError:
    """Return the error for the field `param` of a request."""
    return RequestError(f"{param}: {problem}", param=param)


def status_of(error: Exception) -> int:
    """Return the HTTP status of `error`."""
    if isinstance(error, ClusterError):
        return error.http_status
    return error.status_code if isinstance(error, HTTPException) else 500


def message_of(error: Exception) -> str:
    """Return the message for the client: `.public` of our own errors, nothing specific of unexpected ones."""
    if isinstance(error, ClusterError):
        return error.public
    if isinstance(error, HTTPException):
        return str(error.detail)
    return "internal server error. See the server's log."


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "server_full", 503: "not_ready"}
"""OpenAI's names of errors by status. Some classes of errors have a `code` of their own."""


def error_body(error: Exception) -> Json:
    """Return the body `{"error": …}` in OpenAI's format."""
    status = status_of(error)
    usual = "invalid_request_error" if status < 500 else "server_error"
    param = error.param if isinstance(error, RequestError) else None
    own_code = getattr(error, "code", None) if isinstance(error, RequestError) else None
    facts = {"message": message_of(error), "type": _TYPES.get(status, usual), "param": param}
    return {"error": {**facts, "code": own_code or _CODES.get(status)}}


def error_response(error: Exception, error_format: ErrorFormat = error_body) -> JSONResponse:
    """Return the HTTP response to `error`, with `Retry-After` if a later attempt can succeed."""
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, NotReadyError):
        headers["Retry-After"] = str(math.ceil(RETRY_SECONDS))
    return JSONResponse(error_format(error), status_of(error), headers)


def request_error(errors: Sequence[Any]) -> RequestError:
    """Return the first of pydantic's errors as a RequestError that names the field as the client wrote it."""
    # Where a field may have several types, the type that fits best has the deepest error. A path of a missing
    # field has a level that the object lacks.
    same_field = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    found = max(same_field, key=lambda each: len(each["loc"]) - (each["type"] == "missing"))
    where = tuple(part for part in found["loc"] if isinstance(part, int) or not _TYPE.match(part))
    if found["type"] == FIELD:
        where = (*where, found["ctx"]["field"])
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)[1:MAX_NAME]
    if found["type"] == "json_invalid":
        return RequestError(f"request body: invalid JSON: {found['ctx']['error']}")
    # Each type that the field may have has an error of its own.
    is_type = found["loc"] and _TYPE.match(str(found["loc"][-1]))
    others = [each["msg"] for each in same_field if each["loc"][:-1] == found["loc"][:-1]]
    message = " or ".join(dict.fromkeys(others)) if is_type else found["msg"]
    message = message.removeprefix("Value error, ").replace("Input should ", "must ")
    message = message[0].lower() + message[1:]
    return RequestError(f"{name}: {message}" if name else message, param=name or None)


EMBEDDINGS = "This server computes no embeddings. Start it with mtp-coord serve --embeddings MODEL."


def install_error_handlers(app: FastAPI, formats: Mapping[str, ErrorFormat]) -> None:
    """Answer exceptions in the format that `formats` has for the prefix of the path, or in OpenAI's."""

    async def answer(request: Request, error: Exception) -> Response:
        path = request.scope["path"]
        if isinstance(error, HTTPException) and error.detail == "Not Found":
            advice = EMBEDDINGS if "/embed" in path else "docs/API.md lists the paths."
            error = HTTPException(404, f"{path}: path not found. {advice}")
        elif isinstance(error, HTTPException) and error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            text = f"{path}: {request.method} is not possible. Use {allowed}."
            error = HTTPException(405, text, error.headers)
        if isinstance(error, RequestValidationError):  # of the query
            error = request_error([{**each, "loc": each["loc"][1:]} for each in error.errors()])
        for prefix, error_format in formats.items():
            if path.startswith(prefix):
                return error_response(error, error_format)
        return error_response(error)

    # Starlette raises an unexpected exception again after the answer, and uvicorn logs it.
    for kind in (ClusterError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)
