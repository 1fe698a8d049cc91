"""The servers that commands of this user find without --url, with their keys and authorities."""

from __future__ import annotations

import contextlib
import fcntl
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from coordinator.trust.keys import MACHINES_KEY, OWNER_KEY
from proto import errors
from proto.state_dir import LOCK, SERVER_FILE, read_json, state_dir

DEFAULT_URL = "http://127.0.0.1:8080"

CLIENT = "client"
"""The folder in the state directory of what `mtp-coord connect` keeps."""

PROOF_SECONDS = 1.0
"""Seconds. Deadline of the request by which a server proves that it is a known one."""


@dataclass(frozen=True)
class KnownServer:
    """A server: its URL, the key for commands, the one for agents, and the authorities that issue its certificate.

    The keys may be empty. Without `authorities` only public ones are accepted. `is_own` is a server on this machine.
    """

    url: str
    key: str = field(default="", repr=False)
    agent_key: str = field(default="", repr=False)
    authorities: Path | None = None
    is_own: bool = False

    def tls(self) -> ssl.SSLContext:
        """Return the settings with which clients verify the server."""
        context = ssl.create_default_context()
        if self.authorities is not None:
            context.load_verify_locations(self.authorities)
        return context

    def has_address(self, url: str) -> bool:
        """Return whether `url` has the scheme, address and port of this server. `localhost` is any own address."""
        asked, own = urlsplit(url), urlsplit(self.url)
        same_host = asked.hostname == own.hostname or (self.is_own and asked.hostname == "localhost")
        return same_host and (asked.scheme, asked.port) == (own.scheme, own.port)

    def answers_at(self, url: str) -> bool:
        """Return whether the server at `url` proves by a certificate of the cluster that it is this server."""
        if not url.startswith("https:") or self.authorities is None:
            return False
        with contextlib.suppress(httpx.HTTPError):
            tls = ssl.create_default_context(cafile=self.authorities)
            httpx.head(f"{url}/health", verify=tls, timeout=PROOF_SECONDS, trust_env=False)
            return True
        return False


def find_server(url: str, api_key: str | None) -> KnownServer:
    """Return the server at `url`, or the known one for an empty `url`. Raises UsageError for a malformed URL.

    The server on this machine comes first while it runs, then the one of `mtp-coord connect`, then the one whose
    cluster this machine belongs to. No other server gets their keys. The first of the keys in `api_key`, which may hold
    several with spaces between, replaces the known ones.
    """
    known, base = known_servers(), server_url(url or DEFAULT_URL)
    found = next((one for one in known if not url or one.has_address(base)), None)
    if found is None:  # the known server may have another address
        proven = next((one for one in known if one.answers_at(base)), KnownServer(base))
        found = replace(proven, url=base, is_own=False)
    keys = (api_key or "").split()
    return replace(found, key=keys[0], agent_key=keys[0]) if keys else found


def known_servers() -> list[KnownServer]:
    """Return the servers that this user's state directory names, the first choice first."""
    state = state_dir(None)
    others = [_known(state / folder / SERVER_FILE, state / folder) for folder in (CLIENT, "worker")]
    own = _known(state / OWNER_KEY, state / "authority", _read(state / MACHINES_KEY).get("key", ""), is_own=True)
    return [one for one in ((own, *others) if _runs(state) else (*others, own)) if one.url]


def _known(file: Path, folder: Path, agent_key: str = "", *, is_own: bool = False) -> KnownServer:
    content, authorities = _read(file), folder / "authorities.pem"
    url, key = content.get("url", ""), content.get("key", "")
    return KnownServer(url, key, agent_key or key, authorities if authorities.is_file() else None, is_own)


def _read(file: Path) -> dict[str, str]:
    with contextlib.suppress(errors.UsageError):  # as for another user's directory
        return read_json(file)
    return {}


def _runs(state: Path) -> bool:
    """Return whether a coordinator uses the directory `state` now."""
    with contextlib.suppress(FileNotFoundError, PermissionError), (state / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


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
