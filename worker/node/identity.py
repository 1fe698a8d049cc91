"""What stays the same for as long as a worker's process lives."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from proto.span import Span
from worker.node.local_models import LocalModels


@dataclass
class Identity:
    """What the command line and the start decide. `memory_limit` in bytes; `bytes_per_second` as measured."""

    name: str
    pinned: Span | None
    memory_limit: int
    models: LocalModels
    bytes_per_second: float = 0.0
    wired: bool = True
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    started: float = field(default_factory=time.monotonic)
