"""The files of a cluster that are read after each change: its nodes and join tokens, and the API keys of its server."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from proto.errors import AccessError, UsageError
from proto.state_dir import locked, read_json, write_private
from proto.trust.joining import JoinToken, is_proof

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StateFile:
    """A JSON object in the state directory that several processes change. `defaults` are its missing fields."""

    path: Path
    defaults: dict[str, Any]

    @property
    def version(self) -> int:
        """A number that changes with the file; 0 without a file."""
        try:
            return self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def read(self) -> dict[str, Any]:
        """Return the content. Raises UsageError for a damaged file."""
        return {**copy.deepcopy(self.defaults), **read_json(self.path)}

    @contextlib.contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        """Give the content under a lock, and write it when the block ends without an error."""
        with locked(self.path.parent):
            content = self.read()
            yield content
            write_private(self.path, json.dumps(content, indent=1))


@dataclass(frozen=True)
class Node:
    """A node that joined. Times are in seconds since the epoch."""

    node_id: str
    name: str
    joined: float
    expires: float
    removed: bool = False


class Registry:
    """The nodes and tokens in the state directory. Every method reads the file, and changes it under a lock."""

    def __init__(self, state: Path) -> None:
        empty = {"nodes": {}, "tokens": {}, "address": ""}
        self.file = StateFile(state / "authority" / "registry.json", empty)

    # ---- nodes

    def nodes(self) -> list[Node]:
        """Return all nodes, removed ones included, in the order of joining."""
        return [Node(node_id, **facts) for node_id, facts in self.file.read()["nodes"].items()]

    def removed(self) -> frozenset[str]:
        """Return the node ids of the removed nodes."""
        return frozenset(node.node_id for node in self.nodes() if node.removed)

    def record_node(self, node_id: str, name: str, expires: float) -> None:
        """Record a node with a new certificate. Raises AccessError for a removed node."""
        with self.file.changing() as content:
            known = content["nodes"].get(node_id, {"name": "", "joined": time.time()})
            if known.get("removed"):
                raise AccessError("the node was removed from the cluster")
            facts = {"name": name or known["name"], "joined": known["joined"]}
            content["nodes"][node_id] = {**facts, "expires": expires, "removed": False}

    def remove_nodes(self, name: str) -> list[Node]:
        """Remove the nodes with this name or node id, and return them. Raises UsageError when there is none."""
        with self.file.changing() as content:
            found = {
                node_id: facts
                for node_id, facts in content["nodes"].items()
                if name in (facts["name"], node_id) and not facts["removed"]
            }
            if not found:
                raise UsageError(f"no node is named {name!r:.80}. See mtp-coord node list")
            for facts in found.values():
                facts["removed"] = True
        return [Node(node_id, **facts) for node_id, facts in found.items()]

    # ---- tokens

    def add_token(
        self, token: JoinToken, seconds: float, uses: int, *, is_local: bool = False
    ) -> None:
        """Record a new token. Only the public half of its secret is stored. A local one replaces the last local one."""
        with self.file.changing() as content:
            now = time.time()
            content["tokens"] = {
                token_id: known
                for token_id, known in content["tokens"].items()
                if known["expires"] > now and not (is_local and known.get("local"))
            }
            due = now + seconds
            facts = {"verifier": token.verifier, "expires": due, "uses": uses, "local": is_local}
            content["tokens"][token.token_id] = facts

    def use_token(self, token_id: str, proof: bytes, session: bytes, request: str) -> None:
        """Check the proof of a token and count one use. Raises AccessError, with details only for a valid proof."""
        with self.file.changing() as content:
            token = content["tokens"].get(token_id)
            if token is None:
                raise AccessError("it is revoked, expired long ago, or is of another cluster")
            if not is_proof(token["verifier"], proof, session, request):
                raise AccessError("its secret is wrong. Copy the whole token")
            if token["expires"] <= time.time():
                raise AccessError("it has expired")
            if token["uses"] < 1:
                raise AccessError("it is used")
            token["uses"] -= 1

    def revoke_token(self, token_id: str) -> None:
        """Delete a token. Raises UsageError for an unknown one."""
        with self.file.changing() as content:
            if content["tokens"].pop(token_id, None) is None:
                raise UsageError(f"no token has the id {token_id!r:.40}. See mtp-coord token list")

    def tokens(self) -> dict[str, dict[str, Any]]:
        """Return the tokens that users made, by id: expiry time and remaining uses."""
        found = self.file.read()["tokens"]
        return {token_id: facts for token_id, facts in found.items() if not facts.get("local")}

    # ---- the address of the coordinator, for tokens

    def record_address(self, address: str) -> None:
        """Record where machines join."""
        with self.file.changing() as content:
            content["address"] = address

    def address(self) -> str:
        """Return where machines join; empty before a coordinator listened."""
        return str(self.file.read()["address"])


KEY_PREFIX = "mtp-"

API_KEY = "MTP_API_KEY"
"""Environment variable of --api-key. Unlike an option, it is not visible in a list of processes."""

OWNER_KEY = Path("keys", "owner.json")
"""The file in the state directory with the key of its owner, and with the URL of the server that accepts this key."""


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
        """Store a new key and return it. Nothing can show it again. Raises UsageError for a known name."""
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

    def find(self, sent: bytes) -> ApiKey | None:
        """Return the key with the text `sent`, or None. The time does not depend on which key matches."""
        digest = hashlib.sha256(sent).hexdigest()
        found = None
        for key in (*self.stored_keys(), *self._owner_keys):
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
    return key, hashlib.sha256(key.encode()).hexdigest()
