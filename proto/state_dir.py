"""The state directory of a program: its place, the private files in it, and the atomic replacement of a file."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from proto.errors import UsageError

log = logging.getLogger(__name__)

STATE_DIR = "MTP_STATE_DIR"
"""The environment variable that names the state directory."""

COORDINATOR = Path("worker", "coordinator.json")
"""The file in the state directory with `join`, the address at which this machine joined another one's cluster, and
`name`, the last coordinator that used its worker."""


HOLDER_BYTES = 1024
"""Bytes of the description of the worker that counts this machine's memory."""

SERVER_FILE = "server.json"
"""The file with the URL of a coordinator and a key for it, beside the certificates of its authorities."""

LOCK = "coordinator.lock"
"""The file that the coordinator locks which uses the state directory."""


def state_dir(given: Path | None) -> Path:
    """Return the state directory: `given`, else MTP_STATE_DIR, else the user's directory on this platform."""
    named = given or os.environ.get(STATE_DIR)
    return Path(named) if named else user_state_path("mtp-cluster", appauthor=False)


def replace_file(file: Path, data: bytes, mode: int) -> None:
    """Replace a small file atomically, even when several processes write it. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=f"{file.name}.", suffix=".part", dir=file.parent)
    part = Path(name)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(descriptor)
        part.chmod(mode)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def write_private(file: Path, text: str) -> None:
    """Replace `file` atomically, readable by its owner only. Raises UsageError when that fails."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(file, text.encode(), 0o600)
    except OSError as error:
        raise UsageError(
            f"--state-dir {file.parent}: cannot be written: {error.strerror}. Name another directory"
        ) from error


def read_text(file: Path) -> str | None:
    """Return the text of `file`, or None when it does not exist. Raises UsageError when it is unreadable."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read: {error}. Restore it from a backup") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in `file`, empty when it does not exist. Raises UsageError when it is damaged."""
    text = read_text(file)
    try:
        found = json.loads(text) if text is not None else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{file}: is damaged. Restore it from a backup")
    return found


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of `directory` against other processes for one read and write of its files."""
    try:
        descriptor = _open_lock(directory, ".lock")
    except OSError as error:
        raise UsageError(
            f"--state-dir {directory}: cannot be used: {error.strerror}. Name another directory"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def claim(directory: Path) -> None:
    """Let no other coordinator use `directory` until this process ends. Raises UsageError with its process id."""
    try:
        descriptor = _open_lock(directory, LOCK)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, f"{os.getpid():<20}".encode())
    except BlockingIOError as error:
        pid = os.read(descriptor, 20).decode().strip()
        raise UsageError(
            f"--state-dir {directory}: the coordinator with process id {pid} uses it. Stop that one, or name "
            "another directory"
        ) from error
    except OSError as error:  # such as a read-only disk, on which a coordinator changes no file
        log.warning("no lock of the state directory", extra={"error": str(error)})


def claim_memory(directory: Path, holder: dict[str, Any], *, shared: bool) -> None:
    """Let no other worker count this machine's memory until this process ends, but with `shared` others that share it.

    `holder` has the `name`, `address` and `pid` of this worker. Raises UsageError that names the other worker.
    """
    try:
        descriptor = _open_memory_lock(directory)
        if known := _take_or_read(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            os.close(descriptor)
            raise UsageError(
                f"the worker {known.get('name')} at {known.get('address')} (process {known.get('pid')}) counts the "
                "memory of this machine already. Use that one, or start each with --memory-limit"
            )
        os.pwrite(descriptor, f"{json.dumps(holder):<{HOLDER_BYTES}}".encode(), 0)
    except OSError as error:  # such as a read-only disk
        log.warning("no lock of the memory", extra={"error": str(error)})


def running_worker(directory: Path) -> dict[str, Any]:
    """Return the `holder` of `claim_memory` that runs now; empty without one."""
    try:
        descriptor = _open_memory_lock(directory)
    except OSError:
        return {}
    try:
        return _take_or_read(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _open_memory_lock(directory: Path) -> int:
    device = re.sub(r"\W", "-", os.environ.get("CUDA_VISIBLE_DEVICES", ""))  # each GPU has its own memory
    return _open_lock(directory, f"worker{device}.lock")


def _take_or_read(descriptor: int, kind: int) -> dict[str, Any]:
    """Take the lock and return nothing, or return the description of the worker that has it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return dict(json.loads(os.pread(descriptor, HOLDER_BYTES, 0) or '{"name": "that starts"}'))
    return {}


def _open_lock(directory: Path, name: str) -> int:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600)


@dataclass(frozen=True)
class StateFile:
    """A JSON object in the state directory that several processes change. `defaults` are its missing fields."""

    path: Path
    defaults: dict[str, Any]

    @property
    def version(self) -> int:
        """A number that changes with the file; 0 without a file."""
        try:
            return self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def read(self) -> dict[str, Any]:
        """Return the content. Raises UsageError for a damaged file."""
        return {**copy.deepcopy(self.defaults), **read_json(self.path)}

    @contextlib.contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        """Give the content under a lock, and write it when the block ends without an error."""
        with locked(self.path.parent):
            content = self.read()
            yield content
            write_private(self.path, json.dumps(content, indent=1))
