"""The client of a request: whose part of the queue and of the pipeline the request takes."""

from __future__ import annotations

from starlette.requests import Request


def client_of(request: Request) -> str:
    """Return the name of the request's API key, else its address.

    Keys of `--api-key` have no name, and several clients may share one.
    """
    if name := getattr(request.state, "key_name", ""):
        return f"key {name}"
    return "" if request.client is None else f"address {request.client.host}"
