"""The commands' side of the HTTP API: calls and event streams."""

from __future__ import annotations

import contextlib
import json
import ssl
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer

from coordinator.cli.known_servers import PROOF_SECONDS, KnownServer, find_server
from coordinator.trust.keys import API_KEY
from proto import errors, local_network
from proto.announcement import host_of, is_loopback
from proto.state_dir import COORDINATOR, STATE_DIR, read_json, state_dir

REPLY_SECONDS = 5.0
"""Seconds. Deadline of one call; the server answers these from memory."""

MAX_REPLY_BYTES = 256 * 2**20
"""Bytes. Bound on the memory that an answer may take. A trace of 8192 frames through 64 stages stays below."""

UrlOption = Annotated[str, typer.Option(help="URL of mtp-coord serve.  [default: the server that this machine knows]")]
KeyOption = Annotated[str | None, typer.Option(envvar=API_KEY, help="An API key of the server.")]


def connection(server: KnownServer) -> dict[str, Any]:
    """Return the arguments of httpx's clients for `server`."""
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if server.key:
        headers["Authorization"] = f"Bearer {server.key}"
    return {"base_url": server.url, "headers": headers, "verify": server.tls(), "trust_env": False}


def call(
    method: str,
    url: str,
    path: str,
    api_key: str | None,
    *,
    deadline: float = REPLY_SECONDS,
    content: object = None,
) -> bytes:
    """Send `method path` to the server that `find_server` returns, and return the body of the answer.

    Raises the errors of `refusal` and `no_answer`.
    """
    return call_server(method, find_server(url, api_key), path, deadline=deadline, content=content)


def call_server(
    method: str,
    server: KnownServer,
    path: str,
    *,
    deadline: float = REPLY_SECONDS,
    content: object = None,
    tls: ssl.SSLContext | None = None,
) -> bytes:
    """Send `method path` to `server`, verified by `tls` if given, and return the body of the answer.

    Raises the errors of `refusal` and `no_answer`.
    """
    body, url, settings = b"", server.url, connection(server)
    with httpx.Client(timeout=deadline, **settings | {"verify": tls or settings["verify"]}) as client:
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
    """Return the error for a server that cannot be reached, or that cannot be verified."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return errors.NotReadyError(
            f"the certificate of {url} is not trusted here: {cause.verify_message.rstrip('.')}. If it is your server, "
            "run on its machine mtp-coord token create --client, and here the line that it prints"
        )
    if isinstance(cause, ssl.SSLError) and cause.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return errors.NotReadyError(f"{url} does not speak HTTPS. Give its --url with http://")
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) and url.startswith("http:") and _speaks_tls(url):
        return errors.NotReadyError(f"{url} speaks HTTPS. Give its --url with https://")
    host = urlsplit(url).hostname or ""
    advice = _other_machine() if is_loopback(host) else local_network.advice(str(error), host)
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


def unverified_tls() -> ssl.SSLContext:
    """Return settings that accept every server, for requests without a secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _speaks_tls(url: str) -> bool:
    """Return whether the server at `url`, which did not answer HTTP, answers HTTPS."""
    url = url.replace("http:", "https:", 1)
    with contextlib.suppress(httpx.HTTPError):
        httpx.head(url, verify=unverified_tls(), timeout=PROOF_SECONDS, trust_env=False)
        return True
    return False


def refusal(url: str, status: int, body: bytes) -> errors.ClusterError:
    """Return the error for `status`, a ProtocolError if the answer is not that of an API."""
    if status == 401:
        return errors.AccessError(
            f"{url} requires an API key. Give one with --api-key or {API_KEY}, or run here the line of mtp-coord token "
            f"create --client. On the server's own machine, set {STATE_DIR} to its --state-dir instead"
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
