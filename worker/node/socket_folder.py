"""The folder of a worker's Unix socket, and the removal of folders that killed workers left behind."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "mtp-"
LOCK = "lock"
"""File that a worker locks as long as it runs. The system ends the lock of a killed process."""


@contextmanager
def socket_folder() -> Iterator[str]:
    """Yield a new folder that only this user may enter. It is removed when the block exits.

    Folders of this user whose workers were killed are removed first.
    """
    remove_stale_folders(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        fresh = Path(folder) / "new"
        with fresh.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            fresh.rename(fresh.with_name(LOCK))  # another worker sees the file only with its lock
            yield folder


def remove_stale_folders(parent: Path) -> None:
    """Remove the socket folders in `parent` that belong to this user and that no process has locked."""
    removed = 0
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):  # a folder of another user, or one that is being removed
            if lock.parent.is_symlink() or lock.parent.stat().st_uid != os.geteuid():
                continue
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
            removed += 1
    if removed:
        log.info("sockets of killed workers removed", extra={"count": removed})
