"""The options of a worker from its command line, and the port that it remembers between runs."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proto.errors import UsageError
from proto.span import Span

DEFAULT_PORT = 50505
_STATE_FILE = "worker.json"


@dataclass(frozen=True)
class WorkerOptions:
    """`model` is a checkpoint directory or None; `memory_limit` in bytes; port 0 lets the system choose."""

    host: str
    port: int
    name: str
    layers: Span | None
    model: Path | None
    memory_limit: int
    mdns: bool
    state_dir: Path | None
    wired: bool = True
    insecure: bool = False
    join: str | None = field(default=None, repr=False)  # a secret
    awake: bool = True


def remembered_port(state_dir: Path | None, name: str, host: str) -> int:
    """Return the port of this worker's last run with the same state directory, or 0 if it is unknown or in use.

    A coordinator without mDNS finds a restarted worker at the same address.
    """
    if state_dir is None:
        return 0
    try:
        port = int(_known_ports(state_dir)[name])
        if not 0 < port < 2**16:
            return 0
        # Like the server, this ignores connections that a killed worker left behind.
        with socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ):
            return port
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def remember_port(state_dir: Path | None, name: str, port: int) -> None:
    """Store the port for `remembered_port`. Raises UsageError when the directory is not writable."""
    if state_dir is None:
        return
    part = state_dir / f"{_STATE_FILE}.part"
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({**_known_ports(state_dir), name: port}))
        part.replace(state_dir / _STATE_FILE)
    except OSError as error:
        raise UsageError(f"--state-dir {state_dir}: cannot be used: {error}") from error


def _known_ports(state_dir: Path) -> dict[str, Any]:
    """Return the stored ports by worker name. A missing or damaged file has none."""
    try:
        known = json.loads((state_dir / _STATE_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
