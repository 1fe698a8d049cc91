"""One warning for connections that cannot be accepted, where asyncio would log a traceback for each."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from typing import Any

log = logging.getLogger(__name__)

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors after which asyncio accepts no connection for a second, and then tries again."""

LOG_SECONDS = 60.0
"""Seconds. Shortest time between two warnings. asyncio reports each connection of a flood, hundreds a second."""


def warn_once_of_shortage(loop: asyncio.AbstractEventLoop) -> None:
    """Log failed accepts of the servers of `loop` as one warning in LOG_SECONDS. Other errors are logged as before."""
    logged, count = -math.inf, 0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an exception that no task expected."""
        nonlocal logged, count
        error = context.get("exception")
        accepting = "accept" in context["message"]
        if not (accepting and isinstance(error, OSError) and error.errno in SHORTAGES):
            loop.default_exception_handler(context)
            return
        count += 1
        if loop.time() >= logged + LOG_SECONDS:
            log.warning(
                "connections wait: %s. Raise the limit on open files, such as with ulimit -n",
                error.strerror,
                extra={"count": count},
            )
            logged, count = loop.time(), 0

    loop.set_exception_handler(handle)
