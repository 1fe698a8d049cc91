"""The limit on open files, which macOS sets to 256 for programs that launchd starts."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

WANTED = 8192
"""Open files. Each streaming client needs one, and so does each connection to another process."""


def raise_open_file_limit() -> int:
    """Raise this process's soft limit to WANTED, as far as the hard limit permits. Return the limit in force.

    A limit that is already higher stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= WANTED:
        return soft
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:  # macOS also bounds it by kern.maxfilesperproc
        log.debug("open file limit not raised", extra={"limit": soft, "error": str(error)})
        return soft
    return wanted


def keep_open_file_limit() -> None:
    """Void later changes of this process's limit. Call this before mlx-lm is imported.

    mlx-lm sets the limits to 2048 and 4096 when it is imported. A process cannot raise its hard limit again. The import
    fails where the hard limit is below 4096.
    """
    set_limit = resource.setrlimit

    def set_other_limit(which: int, limits: tuple[int, int]) -> None:
        """Set a limit, unless it is the one on open files."""
        if which != resource.RLIMIT_NOFILE:
            set_limit(which, limits)

    resource.setrlimit = set_other_limit
