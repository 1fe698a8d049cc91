"""Errors in Anthropic's format."""

from __future__ import annotations

from coordinator.api.request.errors import ContextLengthError, message_of, status_of
from coordinator.text.model_info import Json

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: Exception) -> Json:
    """Return the error body of Anthropic's API."""
    status = status_of(error)
    usual = "invalid_request_error" if status < 500 else "api_error"
    details = {"type": _TYPES.get(status, usual), "message": _message(error)}
    return {"type": "error", "error": details, "request_id": None}


def _message(error: Exception) -> str:
    """Return the message for the client.

    Agents look for the words of Anthropic's API to compact the conversation or to lower `max_tokens`.
    """
    if not isinstance(error, ContextLengthError):
        return message_of(error)
    if error.max_tokens is None:
        return f"prompt is too long: {error.prompt} tokens > {error.limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt} + {error.max_tokens} > {error.limit}, "
        "decrease input length or `max_tokens` and try again"
    )
