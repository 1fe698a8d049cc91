"""The identity in a certificate: cluster, role and node. Peers are authenticated by it, not by their address."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from enum import StrEnum

from proto.errors import AccessError

ID_BYTES = 8
"""Bytes of a cluster id and of a node id; both are written as hexadecimal digits."""

_ID = rf"[0-9a-f]{{{2 * ID_BYTES}}}"
_URI = re.compile(rf"mtp://({_ID})/(coordinator|worker)/({_ID})")


class Role(StrEnum):
    """The two kinds of node."""

    COORDINATOR = "coordinator"
    WORKER = "worker"


@dataclass(frozen=True)
class NodeIdentity:
    """One node of one cluster. Certificates carry it as a URI and as DNS names."""

    cluster: str
    role: Role
    node: str

    @property
    def uri(self) -> str:
        """The URI subject alternative name: `mtp://CLUSTER/ROLE/NODE`."""
        return f"mtp://{self.cluster}/{self.role}/{self.node}"

    @property
    def host_names(self) -> tuple[str, str]:
        """The DNS names of the certificate: one for this node, and one for every node of its role."""
        return host_name(self.cluster, self.role, self.node), host_name(self.cluster, self.role)

    @classmethod
    def parse(cls, uri: str) -> NodeIdentity:
        """Invert `uri`. Raises AccessError for any other text."""
        match = _URI.fullmatch(uri)
        if match is None:
            raise AccessError("the peer's certificate names no node of a cluster")
        return cls(match[1], Role(match[2]), match[3])


def host_name(cluster: str, role: Role, node: str = "") -> str:
    """Return the name that a TLS client expects in the peer's certificate.

    With `node` only that node has the name. Without it, every node of `role` in `cluster` has it.
    """
    return ".".join(filter(None, (node, role, cluster, "mtp-cluster")))


def new_id() -> str:
    """Return a random cluster id or node id."""
    return secrets.token_hex(ID_BYTES)


def is_id(text: str) -> bool:
    """Return whether `text` is a cluster id or node id."""
    return re.fullmatch(_ID, text) is not None
