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

BEGINNING = 40
"""Length of the beginning that is shown of a longer record. Its end names the error."""


def crashes_of(folder: Path) -> list[str]:
    """Return the crashes in the logs of a folder, each with the name of its log."""
    found = []
    for log in sorted(folder.glob("*.log")):
        text = log.read_text(errors="replace")
        places = [at for crash in CRASHES if (at := text.find(crash)) >= 0]
        if places:
            found.append(f"{log.name}: {_excerpt(text[min(places) :])}")
    return found


def _excerpt(text: str) -> str:
    """Return the start of `text`, or start and end of its first line if this is a long record."""
    line = text.partition("\n")[0]
    if len(line) <= SHOWN:
        return text[:SHOWN]
    return f"{line[:BEGINNING]} … {line[BEGINNING - SHOWN :]}"
