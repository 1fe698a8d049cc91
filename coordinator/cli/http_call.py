"""Short HTTP calls of the commands to a running coordinator."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Annotated
from urllib.parse import urlsplit

import typer

from proto.errors import AccessError, NotReadyError, ProtocolError, UsageError
from proto.trust.state_dir import state_dir

API_KEY = "MTP_API_KEY"
"""Environment variable of --api-key. Unlike an option, it is not visible in a list of processes."""

DEFAULT_URL = "http://127.0.0.1:8080"

REPLY_SECONDS = 5.0
"""Seconds. Deadline of one call; the server answers these from memory."""

MAX_REPLY_BYTES = 4 * 2**20
"""Bytes. Bound on the memory that an answer may take."""

UrlOption = Annotated[str, typer.Option(help="URL of mtp-coord serve.")]
PortOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=65535, help="Port of mtp-coord serve on this machine, instead of --url."
    ),
]
KeyOption = Annotated[
    str | None, typer.Option(envvar=API_KEY, help="One of the server's API keys.")
]


def server_url(url: str, port: int | None) -> str:
    """Return the root URL of a server, for --url as users write it, or for --port on this machine.

    A missing scheme and a trailing `/v1` are accepted. Raises UsageError for a malformed URL, and for both options.
    """
    if port is not None:
        if url != DEFAULT_URL:
            raise UsageError("give --url or --port, not both")
        return f"http://127.0.0.1:{port}"
    try:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        if parts.scheme not in ("http", "https"):
            raise ValueError(parts.scheme)
        host, given_port = parts.hostname, parts.port
    except ValueError:
        raise UsageError(f"--url {url!r}: write it as in {DEFAULT_URL}") from None
    if not host:
        raise UsageError(f"--url {url!r} names no host. Write it as in {DEFAULT_URL}")
    host = f"[{host}]" if ":" in host else host
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{host}{'' if given_port is None else f':{given_port}'}{path}"


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the header with the first of the keys in `api_key`, which may hold several with spaces between."""
    return {"Authorization": f"Bearer {api_key.split()[0]}"} if api_key and api_key.strip() else {}


def call(
    method: str,
    url: str,
    path: str,
    api_key: str | None,
    expected: int = 200,
    *,
    deadline: float = REPLY_SECONDS,
    max_bytes: int = MAX_REPLY_BYTES,
    content: object = None,
) -> bytes:
    """Send `method path` to the server at `url` and return the body of the answer.

    `url` is a result of `server_url`. `content` is sent as JSON. Raises NotReadyError without an answer, AccessError if
    the key is refused, UsageError if the request is, and ProtocolError for an answer that is not a coordinator's.
    """
    parts = urlsplit(server_url(url, None))
    headers = {"Content-Type": "application/json", **authorization(api_key)}
    sent = {name: value.encode() for name, value in headers.items()}
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = trusted_context()
        connection = http.client.HTTPSConnection(
            host, parts.port, timeout=deadline, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=deadline)
    try:
        sent_body = None if content is None else json.dumps(content).encode()
        connection.request(method, f"{parts.path}{path}", sent_body, headers=sent)
        response = connection.getresponse()
        body = response.read(max_bytes)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NotReadyError(
            f"no coordinator answers at {url} ({_reason(error)}). Start mtp-coord serve, or give its --url"
        ) from error
    finally:
        connection.close()
    if response.status == 401:
        raise AccessError(f"{url} requires an API key. Give one with --api-key or {API_KEY}")
    if response.status in (400, 403, 404, 409, 503) and (message := _message(body)):
        raise UsageError(f"the server refused the request: {message}")
    if response.status != expected:
        raise ProtocolError(
            f"{url} answered with status {response.status}. Give the --url of an mtp-coord serve of this release"
        )
    return body


def _message(body: bytes) -> str:
    """Return the message of a coordinator's error, or an empty string for another answer."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def trusted_context() -> ssl.SSLContext:
    """Return a TLS context that accepts public authorities and the cluster in this user's state directory."""
    context = ssl.create_default_context()
    own = state_dir(None) / "authority" / "authorities.pem"
    if own.is_file():
        context.load_verify_locations(own)
    return context


def _reason(error: Exception) -> str:
    """Return the cause in plain words, without the bytes that another program answered."""
    if isinstance(error, OSError):
        return (error.strerror or "timed out").lower() if error.args else "connection closed"
    return "another program answered"
