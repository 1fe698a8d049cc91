"""The traces of crashes in the logs of processes."""

from __future__ import annotations

from pathlib import Path

CRASHES = (
    "Traceback",
    "Fatal Python",
    "Aborted",
    "terminate called",
    "Exception ignored",
    "core dumped",
)
"""Texts of a process that ended badly."""

SHOWN = 300
"""Length of the shown part of a log after the text of a crash."""


def crashes_of(folder: Path) -> list[str]:
    """Return the crashes in the logs of a folder, each with the name of its log."""
    found = []
    for log in sorted(folder.glob("*.log")):
        text = log.read_text(errors="replace")
        places = [at for crash in CRASHES if (at := text.find(crash)) >= 0]
        if places:
            found.append(f"{log.name}: {text[min(places) :][:SHOWN]}")
    return found
