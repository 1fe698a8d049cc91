"""The registry of a cluster in the state directory: joined nodes, removed nodes and join tokens.

Commands change the files while a coordinator runs. The coordinator reads them again when they change.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proto.errors import AccessError, UsageError
from proto.trust.join_token import JoinToken, is_proof
from proto.trust.state_dir import locked, read_json, write_private


@dataclass(frozen=True)
class Node:
    """A node that joined. Times are in seconds since the epoch."""

    node_id: str
    name: str
    joined: float
    expires: float
    removed: bool = False


class Registry:
    """The nodes and tokens in `directory`. Every method reads the files, and changes them under a lock."""

    def __init__(self, state: Path) -> None:
        self._directory = state / "authority"
        self._file = self._directory / "registry.json"

    @property
    def version(self) -> int:
        """A number that changes with the file; 0 without a file."""
        try:
            return self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    # ---- nodes

    def nodes(self) -> list[Node]:
        """Return all nodes, removed ones included, in the order of joining."""
        return [Node(node_id, **facts) for node_id, facts in self._read()["nodes"].items()]

    def removed(self) -> frozenset[str]:
        """Return the node ids of the removed nodes."""
        return frozenset(node.node_id for node in self.nodes() if node.removed)

    def record_node(self, node_id: str, name: str, expires: float) -> None:
        """Record a node with a new certificate. Raises AccessError for a removed node."""
        with locked(self._directory):
            content = self._read()
            known = content["nodes"].get(node_id)
            if known is not None and known["removed"]:
                raise AccessError("the node was removed from the cluster")
            joined = known["joined"] if known else time.time()
            content["nodes"][node_id] = {
                "name": name or (known["name"] if known else ""),
                "joined": joined,
                "expires": expires,
                "removed": False,
            }
            self._write(content)

    def remove_nodes(self, name: str) -> list[Node]:
        """Remove the nodes with this name or node id, and return them. Raises UsageError when there is none."""
        with locked(self._directory):
            content = self._read()
            found = [
                node_id
                for node_id, facts in content["nodes"].items()
                if name in (facts["name"], node_id) and not facts["removed"]
            ]
            if not found:
                raise UsageError(f"no node is named {name!r:.80}. See mtp-coord node list")
            for node_id in found:
                content["nodes"][node_id]["removed"] = True
            self._write(content)
        return [Node(node_id, **content["nodes"][node_id]) for node_id in found]

    # ---- tokens

    def add_token(self, token: JoinToken, seconds: float, uses: int) -> None:
        """Record a new token. Only the public half of its secret is stored."""
        with locked(self._directory):
            content = self._read()
            now = time.time()
            content["tokens"] = {i: t for i, t in content["tokens"].items() if t["expires"] > now}
            content["tokens"][token.token_id] = {
                "verifier": token.verifier,
                "expires": now + seconds,
                "uses": uses,
            }
            self._write(content)

    def use_token(self, token_id: str, proof: bytes, session: bytes, request: str) -> None:
        """Check the proof of a token and count one use. Raises AccessError, whose text is for the operator's log."""
        with locked(self._directory):
            content = self._read()
            token = content["tokens"].get(token_id)
            if token is None:
                raise AccessError("the token is unknown, expired or revoked")
            if not is_proof(token["verifier"], proof, session, request):
                raise AccessError("the proof of the token is wrong")
            if token["expires"] <= time.time():
                raise AccessError("the token has expired")
            if token["uses"] < 1:
                raise AccessError("the token has no uses left")
            token["uses"] -= 1
            self._write(content)

    def revoke_token(self, token_id: str) -> None:
        """Delete a token. Raises UsageError for an unknown one."""
        with locked(self._directory):
            content = self._read()
            if content["tokens"].pop(token_id, None) is None:
                raise UsageError(f"no token has the id {token_id!r:.40}. See mtp-coord token list")
            self._write(content)

    def tokens(self) -> dict[str, dict[str, Any]]:
        """Return the tokens by id: expiry time and remaining uses."""
        found: dict[str, dict[str, Any]] = self._read()["tokens"]
        return found

    # ---- the address of the coordinator, for tokens

    def record_address(self, address: str) -> None:
        """Record where machines join."""
        with locked(self._directory):
            content = self._read()
            if content["address"] != address:
                self._write({**content, "address": address})

    def address(self) -> str:
        """Return where machines join; empty before a coordinator listened."""
        return str(self._read()["address"])

    # ---- export and import

    def content(self) -> dict[str, Any]:
        """Return everything, for an export."""
        return self._read()

    def replace(self, content: dict[str, Any]) -> None:
        """Replace everything, for an import."""
        with locked(self._directory):
            self._write(content)

    def _read(self) -> dict[str, Any]:
        return {"nodes": {}, "tokens": {}, "address": "", **read_json(self._file)}

    def _write(self, content: dict[str, Any]) -> None:
        write_private(self._file, json.dumps(content, indent=1))
