"""The option --state-dir of the commands that manage a cluster's trust."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from coordinator.trust.authority import Authority
from proto.errors import UsageError
from proto.trust.state_dir import STATE_DIR, state_dir

StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        envvar=STATE_DIR,
        help="Directory of the cluster's certificates and keys.",
        show_default="the user's state directory",
    ),
]


def open_authority(given: Path | None) -> tuple[Path, Authority]:
    """Return the state directory and its authority. Raises UsageError when there is no cluster yet."""
    state = state_dir(given)
    authority = Authority.open(state)
    if authority is None:
        raise UsageError(
            f"{state} has no cluster yet. Start mtp-coord serve with --listen once, or name the right --state-dir"
        )
    return state, authority


def shown_time(seconds: float) -> str:
    """Return a time in seconds since the epoch as `2026-01-31 12:30 UTC`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
