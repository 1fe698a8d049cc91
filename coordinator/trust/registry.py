"""The files of a cluster that are read after each change: its nodes and join tokens, and the API keys of its server."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proto.errors import AccessError, UsageError
from proto.state_dir import StateFile
from proto.trust.joining import JoinToken, is_proof

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """A node that joined, `local` by the token in the state directory. Times are in seconds since the epoch."""

    node_id: str
    name: str
    joined: float
    expires: float
    removed: bool = False
    local: bool = False


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

    def other_machines(self) -> list[str]:
        """Return the names of the machines that joined by a token of a user and are members still."""
        present = (n for n in self.nodes() if not (n.local or n.removed) and n.expires > time.time())
        return list(dict.fromkeys(node.name for node in present))

    def record_node(self, node_id: str, name: str, expires: float, *, is_local: bool = False) -> None:
        """Record a node with a new certificate. Raises AccessError for a removed node."""
        with self.file.changing() as content:
            known = content["nodes"].get(node_id, {"name": "", "joined": time.time()})
            if known.get("removed"):
                raise AccessError("the node was removed from the cluster")
            facts = {"name": name or known["name"], "joined": known["joined"], "local": known.get("local", is_local)}
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
        self, token: JoinToken, seconds: float, uses: int, *, is_local: bool = False, for_clients: bool = False
    ) -> None:
        """Record a new token, of machines or clients. Only the public half of its secret is stored.

        A local one replaces the last local one.
        """
        with self.file.changing() as content:
            now = time.time()
            content["tokens"] = {
                token_id: known
                for token_id, known in content["tokens"].items()
                if known["expires"] > now and not (is_local and known.get("local"))
            }
            due = now + seconds
            facts = {"verifier": token.verifier, "expires": due, "uses": uses, "local": is_local}
            content["tokens"][token.token_id] = facts | {"clients": for_clients}

    def use_token(
        self, token_id: str, proof: bytes, session: bytes, request: str, *, for_clients: bool = False
    ) -> bool:
        """Check the proof of a token, count one use, and return whether the token is local.

        Raises AccessError, with details only for a valid proof.
        """
        with self.file.changing() as content:
            token = content["tokens"].get(token_id)
            if token is None:
                raise AccessError("it is revoked, expired long ago, or is of another cluster")
            if not is_proof(token["verifier"], proof, session, request):
                raise AccessError("its secret is wrong. Copy the whole token")
            if token.get("clients", False) != for_clients:
                raise AccessError("it is for mtp-worker --join" if for_clients else "it is for mtp-coord connect")
            if token["expires"] <= time.time():
                raise AccessError("it has expired")
            if token["uses"] < 1:
                raise AccessError("it is used")
            token["uses"] -= 1
            return bool(token.get("local"))

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
