"""A progress bar over bytes on stderr. When stderr is not a terminal, occasional log lines replace it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from proto.progress import OnProgress
from proto.terminal.size import format_size

LOG_SECONDS = 5.0
"""Seconds between two log lines. Shorter work logs nothing."""


@contextmanager
def byte_bar(what: str, log: logging.Logger | None = None) -> Iterator[OnProgress]:
    """Yield `on_progress(done, total)`, in bytes, which any thread may call.

    Without a terminal the progress goes to `log`, if given. The bar disappears at the end of the block.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what, log)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _lines(what: str, log: logging.Logger | None) -> OnProgress:
    last = time.monotonic()

    def on_progress(done: int, total: int) -> None:
        """Log the progress at most every LOG_SECONDS."""
        nonlocal last
        if log is not None and time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            log.info(what, extra={"done": format_size(done), "total": format_size(total)})

    return on_progress
