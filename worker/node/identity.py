"""The facts about a worker that do not change while its process runs."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from proto.span import Span
from proto.trust.node_trust import NodeTrust
from worker.node.local_models import LocalModels


@dataclass
class Identity:
    """The decisions of the command line and of the start.

    `memory_limit` in bytes; `bytes_per_second` as measured. `wired` False keeps the weights pageable.
    """

    name: str
    pinned: Span | None
    memory_limit: int
    models: LocalModels
    bytes_per_second: float = 0.0
    trust: NodeTrust | None = None
    """The worker's credentials in a cluster; None for a worker whose connections are not secured."""
    wired: bool = True
    id: str = field(default_factory=lambda: secrets.token_hex(8))
