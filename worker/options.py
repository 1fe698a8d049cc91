"""What the command line of a worker decides, checked before anything starts."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path

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


def remembered_port(state_dir: Path | None, name: str) -> int:
    """The port this worker had when it last ran with the same state directory; 0 when there is none, or it is taken.

    A restarted worker that returns to its address is found there by a coordinator without mDNS.
    """
    if state_dir is None:
        return 0
    try:
        port = int(json.loads((state_dir / _STATE_FILE).read_text())[name])
        with socket.socket() as probe:
            probe.bind(("", port))
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return port


def remember_port(state_dir: Path | None, name: str, port: int) -> None:
    """Write the port down for `remembered_port`. Raises UsageError when the directory cannot be written."""
    if state_dir is None:
        return
    file = state_dir / _STATE_FILE
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        known = json.loads(file.read_text()) if file.exists() else {}
        part = file.with_suffix(".part")
        part.write_text(json.dumps({**known, name: port}))
        part.replace(file)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"--state-dir {state_dir}: cannot be used: {error}") from error
