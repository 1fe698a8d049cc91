"""The API keys of a server's clients, and that of its owner."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from proto.announcement import is_loopback
from proto.errors import AccessError, UsageError
from proto.state_dir import StateFile, read_json, write_private

log = logging.getLogger(__name__)

KEY_PREFIX = "mtp-"

API_KEY = "MTP_API_KEY"
"""Environment variable of --api-key. Unlike an option, it is not visible in a list of processes."""

OWNER_KEY = Path("keys", "owner.json")
"""The file in the state directory with the key of its owner, and with the URL of the server that accepts this key."""

MACHINES_KEY = Path("keys", "machines.json")
"""The file with the key of the cluster's machines, the URL at which they reach the server, and the removed nodes."""


class Scope(StrEnum):
    """The kinds of calls that a key may permit."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


@dataclass(frozen=True)
class ApiKey:
    """A stored API key. `digest`, the SHA-256, is all that is kept of it. `created` is seconds since 1970."""

    name: str
    digest: str = field(repr=False)
    scopes: frozenset[Scope]
    created: float = 0.0


class KeyRing:
    """The keys in a state directory, read again after changes. One key seen makes them `required` for good."""

    def __init__(self, state: Path, *, required: bool = False) -> None:
        self.required = required
        self._file = StateFile(state / "keys" / "keys.json", {})
        self._version = -1
        self._keys: list[ApiKey] = []
        self._owner_file = state / OWNER_KEY
        self._owner_keys: list[ApiKey] = []
        self._machines_file = state / MACHINES_KEY
        self._machine_keys: list[ApiKey] = []

    def stored_keys(self) -> list[ApiKey]:
        """Return the keys, read again when the file has changed. Raises UsageError for a damaged file."""
        if (version := self._file.version) != self._version:
            self._keys = [
                ApiKey(name, one["digest"], frozenset(map(Scope, one["scopes"])), one["created"])
                for name, one in self._file.read().items()
            ]
            self._version = version
            self.required |= bool(self._keys)
        return self._keys

    def create(self, name: str, scopes: frozenset[Scope]) -> str:
        """Store a new key and return it. Nothing can show it again. Raises UsageError for a known or empty name."""
        if not name.strip():
            raise UsageError("the name of a key is empty. Give one, such as laptop")
        key, digest = _new_key()
        with self._file.changing() as content:
            if name in content:
                raise UsageError(f"a key named {name!r:.80} exists. Revoke it or choose another")
            content[name] = {"digest": digest, "scopes": sorted(scopes), "created": time.time()}
        return key

    def revoke(self, name: str) -> None:
        """Delete a key. Raises UsageError for an unknown name."""
        with self._file.changing() as content:
            if content.pop(name, None) is None:
                raise UsageError(f"no key is named {name!r:.80}. See mtp-coord key list")

    def admit_owner(self, url: str) -> None:
        """Accept a new key for all calls, kept in a private file. This user's commands send it to `url` only."""
        key, digest = _new_key()
        self._owner_keys = [ApiKey("the owner", digest, frozenset(Scope))]
        try:
            write_private(self._owner_file, json.dumps({"url": url, "key": key}))
        except UsageError as error:  # such as a full disk
            log.warning("commands on this machine need an API key", extra={"error": str(error)})

    def admit_machines(self, url: str, removed: frozenset[str]) -> None:
        """Accept one key for requests and metrics from the machines of the cluster, which get it with `url`.

        Programs that `launch` starts on this machine have it too. It stays until another node is removed.
        """
        found: dict[str, Any] = {}
        with contextlib.suppress(UsageError):  # a damaged file is replaced
            found = read_json(self._machines_file)
        key = (found.get("removed") == sorted(removed) and found.get("key")) or _new_key()[0]
        scopes = frozenset({Scope.INFERENCE, Scope.METRICS})
        self._machine_keys = [ApiKey("a machine of the cluster", _digest(key), scopes)]
        content = {"url": url, "key": key, "removed": sorted(removed)}
        try:
            if content != found:
                write_private(self._machines_file, json.dumps(content))
        except UsageError as error:  # such as a full disk
            log.warning("commands on other machines need an API key", extra={"error": str(error)})

    def find(self, sent: bytes) -> ApiKey | None:
        """Return the key with the text `sent`, or None. The time does not depend on which key matches."""
        digest = hashlib.sha256(sent).hexdigest()
        found = None
        for key in (*self.stored_keys(), *self._owner_keys, *self._machine_keys):
            if secrets.compare_digest(digest, key.digest):
                found = key
        return found

    @staticmethod
    def check_scope(key: ApiKey, scope: Scope) -> None:
        """Raise AccessError when the key does not permit `scope`."""
        if scope not in key.scopes:
            raise AccessError(
                f"The key {key.name} does not permit this call. It needs the scope {scope}. "
                f"Create one with mtp-coord key create NAME --scope {scope}"
            )


def _new_key() -> tuple[str, str]:
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, _digest(key)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


Address = Sequence[Any]
"""Host and port of one end of a connection."""


def is_own_connection(client: Address, server: Address) -> bool:
    """Return whether a process of this user on this machine, but not this one, holds the `client` end to `server`.

    Both ends are compared, because other users can bind the same port number at another address of loopback. It reads
    the sockets of all processes of this user, so it blocks for up to a second.
    """
    import psutil  # here, since commands read the names of this file and look at no process

    ends = _comparable(client), _comparable(server)
    if not is_loopback(ends[0][0]):
        return False
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.uids().real != os.getuid():
                continue
            found: Iterable[Any] = process.net_connections("tcp")
            if any(one.raddr and (_comparable(one.laddr), _comparable(one.raddr)) == ends for one in found):
                return True
    return False


def _comparable(address: Address) -> tuple[str, int]:
    """Return one spelling of an address. A socket for both families sees IPv4 as `::ffff:127.0.0.1`."""
    host = str(address[0])
    with contextlib.suppress(ValueError):  # a name
        found = ipaddress.ip_address(host)
        host = str(getattr(found, "ipv4_mapped", None) or found)
    return host, address[1]
