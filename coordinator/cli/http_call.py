"""Short calls of our commands to a running coordinator over HTTP."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from proto.errors import AccessError, NotReadyError, ProtocolError, UsageError

API_KEY = "MTP_API_KEY"
"""The environment's variable for --api-key, which a list of processes does not show."""

REPLY_SECONDS = 5.0
MAX_REPLY_BYTES = 4 * 2**20


def call(method: str, url: str, path: str, api_key: str | None, expected: int = 200) -> bytes:
    """The body of the answer to `method path`, asked of the server at `url`.

    Raises UsageError for a bad URL, NotReadyError when nothing answers, AccessError when the key is refused,
    ProtocolError when something else answers.
    """
    kinds: dict[str, type[http.client.HTTPConnection]] = {
        "http": http.client.HTTPConnection,
        "https": http.client.HTTPSConnection,
    }
    try:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        kind, host, port = kinds[parts.scheme], parts.hostname, parts.port
    except (KeyError, ValueError):
        raise UsageError(f"--url {url!r}: write it as in http://127.0.0.1:8080") from None
    if not host:
        raise UsageError(f"--url {url!r} names no host: write it as in http://127.0.0.1:8080")
    headers = {"Content-Type": b"application/json"}
    if api_key and api_key.strip():
        # Any of those the server takes: its variable may hold several.
        headers["Authorization"] = f"Bearer {api_key.split()[0]}".encode()
    connection = kind(host, port, timeout=REPLY_SECONDS)
    try:
        connection.request(method, f"{parts.path.rstrip('/')}{path}", headers=headers)
        response = connection.getresponse()
        body = response.read(MAX_REPLY_BYTES)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NotReadyError(
            f"no coordinator answers at {url} ({error}): start mtp-coord serve, or give its --url"
        ) from error
    finally:
        connection.close()
    if response.status == 401:
        raise AccessError(f"{url} wants an API key: give one with --api-key or {API_KEY}")
    if response.status != expected:
        raise ProtocolError(
            f"{url} answered {response.status}: give the --url of an mtp-coord serve with workers, of this "
            "release"
        )
    return body
