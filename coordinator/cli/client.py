"""The commands' side of the HTTP API: calls and event streams."""

from __future__ import annotations

import contextlib
import json
import ssl
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer

from coordinator.trust.keys import API_KEY, OWNER_KEY
from proto import errors
from proto.announcement import host_of, is_loopback
from proto.state_dir import COORDINATOR, STATE_DIR, read_json, state_dir

DEFAULT_URL = "http://127.0.0.1:8080"

REPLY_SECONDS = 5.0
"""Seconds. Deadline of one call; the server answers these from memory."""

MAX_REPLY_BYTES = 256 * 2**20
"""Bytes. Bound on the memory that an answer may take. A trace of 8192 frames through 64 stages stays below."""

UrlOption = Annotated[str, typer.Option(help="URL of mtp-coord serve.")]
KeyOption = Annotated[str | None, typer.Option(envvar=API_KEY, help="An API key of the server.")]


def server_url(url: str) -> str:
    """Return the root of --url, whose scheme and `/v1` are optional. Raises UsageError for a malformed URL."""
    try:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise errors.UsageError(f"--url {url!r}: write it as in {DEFAULT_URL}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _owner_key(url: str) -> tuple[str, ...]:
    """Return the URL and key of the server in this user's state directory if it is the one at `url`.

    Otherwise return `url` alone, because no other program may get the key. `localhost` becomes the server's address.
    Another user of this machine may listen at another address of that name.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(errors.UsageError):  # as for another user's directory
        found = read_json(state_dir(None) / OWNER_KEY)
    own, asked = urlsplit(found.get("url", "")), urlsplit(url)
    same_port = (asked.scheme, asked.port) == (own.scheme, own.port)
    if found and same_port and asked.hostname in (own.hostname, "localhost"):
        return found["url"], found["key"]
    return (url,)


def connection(url: str, api_key: str | None) -> dict[str, Any]:
    """Return the arguments of httpx's clients for the server at `url`.

    It sends the first of the keys in `api_key`, which may hold several with spaces between, or the key of this user's
    own server. It accepts public authorities and the cluster in this user's state directory. Raises UsageError.
    """
    keys, base = (api_key or "").split(), server_url(url)
    if not keys:
        base, *keys = _owner_key(base)
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if keys:
        headers["Authorization"] = f"Bearer {keys[0]}"
    tls, own = ssl.create_default_context(), state_dir(None) / "authority" / "authorities.pem"
    if own.is_file():
        tls.load_verify_locations(own)
    return {"base_url": base, "headers": headers, "verify": tls, "trust_env": False}


def call(
    method: str,
    url: str,
    path: str,
    api_key: str | None,
    *,
    deadline: float = REPLY_SECONDS,
    content: object = None,
) -> bytes:
    """Send `method path` to the server at `url`, as `connection` says, and return the body of the answer.

    Raises the errors of `refusal`, and NotReadyError if no server answers.
    """
    body = b""
    with httpx.Client(timeout=deadline, **connection(url, api_key)) as client:
        try:
            with client.stream(method, path, json=content) as reply:
                for part in reply.iter_raw():
                    body += part
                    if len(body) > MAX_REPLY_BYTES:
                        raise errors.ProtocolError(f"{url}{path}: the answer exceeds {MAX_REPLY_BYTES} bytes")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise no_answer(url, error) from error
    if not reply.is_success:
        raise refusal(url, reply.status_code, body)
    return body


def no_answer(url: str, error: Exception) -> errors.NotReadyError:
    """Return the error for a server that cannot be reached."""
    advice = _other_machine() if is_loopback(urlsplit(server_url(url)).hostname or "") else ""
    advice = advice or "Start mtp-coord serve, or give its --url"
    return errors.NotReadyError(f"no coordinator answers at {url} ({type(error).__name__}). {advice}")


def _other_machine() -> str:
    """Return the advice for a machine that is a worker of another one's cluster; empty for others."""
    found = {}
    with contextlib.suppress(errors.UsageError):  # damaged
        found = read_json(state_dir(None) / COORDINATOR)
    host, name = host_of(str(found.get("join", ""))), str(found.get("name", "")).rpartition(":")[0]
    if not host:
        return ""
    where = f"{name} ({host})" if name else host
    return f"This machine is a worker of a cluster that runs on {where}. Run the command there, or give its --url"


def refusal(url: str, status: int, body: bytes) -> errors.ClusterError:
    """Return the error for `status`, a ProtocolError if the answer is not that of an API."""
    if status == 401:
        return errors.AccessError(
            f"{url} requires an API key. Give one with --api-key or {API_KEY}. On the server's own machine, set "
            f"{STATE_DIR} to its --state-dir instead"
        )
    try:
        found = json.loads(body)["error"]
        message = found if isinstance(found, str) else str(found["message"])  # mlx-lm sends a text
    except (ValueError, KeyError, TypeError):
        return errors.ProtocolError(
            f"{url} answered with status {status}. Give the --url of an mtp-coord serve of this release"
        )
    if status in (502, 503, 504):
        return errors.NotReadyError(f"the server is not ready: {message}")
    if status >= 500:
        return errors.WorkerLostError(f"the server failed with status {status}: {message}")
    return errors.UsageError(f"the server refused the request: {message}")
