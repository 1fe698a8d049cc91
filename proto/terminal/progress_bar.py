"""A progress bar over bytes, on stderr; where that is no terminal, now and then a line in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
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

from proto.terminal.size import format_size

LOG_SECONDS = 5.0
"""Between lines in the log. What takes less has none."""

OnProgress = Callable[[int, int], None]
"""`on_progress(done, total)`, in bytes."""


@contextmanager
def byte_bar(what: str, log: logging.Logger | None = None) -> Iterator[OnProgress]:
    """Yields `on_progress(done, total)`, in bytes; callable from any thread.

    Without a terminal `log` hears of it, where one is given. The bar is gone once the block is left.
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
        nonlocal last
        if log is not None and time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            log.info(what, extra={"done": format_size(done), "total": format_size(total)})

    return on_progress
