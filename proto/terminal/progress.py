"""Progress in bytes: sizes for people, and a bar on the terminal or lines in the log."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from proto.errors import UsageError

OnProgress = Callable[[int, int], None]
"""`on_progress(done, total)`, in bytes."""

_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


def parse_size(text: str) -> int:
    """Return the bytes of `64GB` (powers of 1,000, as on macOS), `64GiB` (of 1,024) or `512B`. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if match is None or (match[2] and match[2].upper() not in _UNITS) or len(match[1]) > 20:
        raise UsageError(f"invalid size {text!r:.60}. Write it as in 64GB, 512MiB or 1.5TB")
    if not match[2]:
        raise UsageError(f"the size {text!r:.60} has no unit. Write {match[1]}GB, or {match[1]}B for bytes")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size == 0:
        raise UsageError(f"invalid size {text!r:.60}. Give a size above zero")
    return size


def format_size(count: int) -> str:
    """Return `count` with three digits in powers of 1,000, as in `17.4 GB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


LOG_SECONDS = 5.0
"""Seconds between two log lines."""


@contextmanager
def byte_bar(what: str, log: logging.Logger | None = None) -> Iterator[OnProgress]:
    """Yield `on_progress` for any thread: a bar until the block ends, or lines in `log` without a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what, log)
        return
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _lines(what: str, log: logging.Logger | None) -> OnProgress:
    last = time.monotonic()

    def on_progress(done: int, total: int) -> None:
        nonlocal last
        if log is not None and time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            log.info(what, extra={"done": format_size(done), "total": format_size(total)})

    return on_progress
