"""The named API keys of the HTTP server, in the state directory. Only hashes are stored."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from coordinator.trust.registry import StateFile
from proto.errors import AccessError, CapacityError, UsageError

KEY_PREFIX = "mtp-"
MINUTE = 60.0


class Scope(StrEnum):
    """The kinds of calls that a key may permit."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


@dataclass(frozen=True)
class ApiKey:
    """A stored key. `digest` is the SHA-256 of the key. A limit of 0 is no limit."""

    name: str
    digest: str = field(repr=False)
    scopes: frozenset[Scope]
    requests_per_minute: int = 0
    streams: int = 0
    created: float = 0.0


class KeyRing:
    """The keys in a state directory. A running server sees changes without a restart."""

    def __init__(self, state: Path) -> None:
        self._file = StateFile(state / "keys" / "keys.json", {})
        self._version = -1
        self._keys: list[ApiKey] = []
        self.count_background: Callable[[str], int] = lambda owner: 0
        """Returns the answers of an owner that run in the background and have no client."""
        self._open: Counter[str] = Counter()
        self._recent: dict[str, deque[float]] = {}

    def stored_keys(self) -> list[ApiKey]:
        """Return the keys, read again when the file has changed. Raises UsageError for a damaged file."""
        if (version := self._file.version) != self._version:
            self._keys = [
                ApiKey(name, **{**facts, "scopes": frozenset(map(Scope, facts["scopes"]))})
                for name, facts in self._file.read().items()
            ]
            self._version = version
        return self._keys

    def create(
        self, name: str, scopes: frozenset[Scope], requests_per_minute: int = 0, streams: int = 0
    ) -> str:
        """Store a new key and return it. Nothing can show it again. Raises UsageError for a known name."""
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        with self._file.changing() as content:
            if name in content:
                raise UsageError(
                    f"a key named {name!r:.80} exists. Revoke it first or choose a name"
                )
            content[name] = {
                "digest": hashlib.sha256(key.encode()).hexdigest(),
                "scopes": sorted(scopes),
                "requests_per_minute": requests_per_minute,
                "streams": streams,
                "created": time.time(),
            }
        return key

    def revoke(self, name: str) -> None:
        """Delete a key. Raises UsageError for an unknown name."""
        with self._file.changing() as content:
            if content.pop(name, None) is None:
                raise UsageError(f"no key is named {name!r:.80}. See mtp-coord key list")

    def find(self, sent: bytes) -> ApiKey | None:
        """Return the key with the text `sent`, or None. The time does not depend on which key matches."""
        digest = hashlib.sha256(sent).hexdigest()
        found = None
        for key in self.stored_keys():
            if secrets.compare_digest(digest, key.digest):
                found = key
        return found

    @contextlib.contextmanager
    def open_request(self, key: ApiKey, scope: Scope, owner: str = "") -> Iterator[None]:
        """Count a request of `key` while the block runs.

        A request that starts an answer has an `owner`, whose answers in the background count as open requests.
        Raises AccessError when the key does not permit `scope`, and CapacityError above a limit of the key.
        """
        if scope not in key.scopes:
            raise AccessError(
                f"The key {key.name} does not permit this call. It needs the scope {scope}."
            )
        recent, now = self._recent.setdefault(key.name, deque()), time.monotonic()
        while recent and recent[0] <= now - MINUTE:
            recent.popleft()
        if key.requests_per_minute and len(recent) >= key.requests_per_minute:
            wait = recent[0] + MINUTE - now
            raise CapacityError(
                f"The key {key.name} has reached its request limit.", retry_after=wait
            )
        background = self.count_background(owner) if owner else 0
        if key.streams and self._open[key.name] + background >= key.streams:
            raise CapacityError(
                f"The key {key.name} has reached its limit of open requests, {background} of them in the background."
            )
        if key.requests_per_minute:
            recent.append(now)
        self._open[key.name] += 1
        try:
            yield
        finally:
            self._open[key.name] -= 1
