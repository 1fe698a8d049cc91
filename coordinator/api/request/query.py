"""Numbers in the query of a URL."""

from __future__ import annotations

from starlette.requests import Request

from proto.errors import RequestError

MAX_DIGITS = 15
"""Maximum digits of a number, so that no text is converted that no list could be so long for."""


def number_in_query(request: Request, name: str, default: int) -> int:
    """Return the whole number `name` of the query. Raises RequestError for other values."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > MAX_DIGITS:
        raise RequestError(f"{name}: {text!r:.40} is not a whole number", param=name)
    return int(text)
