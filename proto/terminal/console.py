"""The process of a command: versions, exit codes, open files, and sleep of a Mac."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NoReturn

import typer

from proto.errors import ClusterError

log = logging.getLogger(__name__)

WANTED = 8192
"""Open files. Each streaming client needs one, and so does each connection to another process."""


def raise_open_file_limit() -> None:
    """Raise this process's soft limit to WANTED, as far as the hard limit permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= WANTED:
        return
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:  # macOS also bounds it by kern.maxfilesperproc
        log.debug("open file limit not raised", extra={"limit": soft, "error": str(error)})


def keep_open_file_limit() -> None:
    """Void later changes of this process's limit. Call this before mlx-lm is imported.

    At its import, mlx-lm sets the limits to 2048 and 4096, or fails where the hard limit is lower.
    """
    set_limit = resource.setrlimit

    def set_other_limit(which: int, limits: tuple[int, int]) -> None:
        if which != resource.RLIMIT_NOFILE:
            set_limit(which, limits)

    resource.setrlimit = set_other_limit


def hide_torch() -> None:
    """Let transformers import no torch, of which no part is used: two seconds and 200 MB. Call this before it."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # of its absence


@contextlib.contextmanager
def keep_awake(*, enabled: bool = True) -> Iterator[None]:
    """Prevent sleep on macOS inside the block, if `enabled`. The coordinator plans without a Mac that sleeps."""
    process: subprocess.Popen[bytes] | None = None
    if enabled and sys.platform == "darwin":
        # It also ends by itself when this process has ended.
        command = ["caffeinate", "-i", "-s", "-w", str(os.getpid())]
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            log.warning("this Mac may fall asleep", extra={"error": str(error)})
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def run(program: str, app: Callable[[], object]) -> None:
    """Call `app` and exit with the status for its result. A ClusterError prints one line, a bug its traceback."""
    raise_open_file_limit()
    keep_open_file_limit()
    hide_torch()
    try:
        app()
    except ClusterError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def run_process(program: str, app: Callable[[], object]) -> NoReturn:
    """Call `run`, and skip Python's finalization, which aborts (status -6) while a thread still computes with MLX."""
    status: object = 0
    try:
        run(program, app)
    except SystemExit as end:
        status = end.code
    if not isinstance(status, int):
        sys.stderr.write(f"{status}\n" if status else "")
        status = 1 if status else 0
    end_process(status)


def end_process(status: int) -> NoReturn:
    """End the process without Python's finalization, after the log and the output are flushed."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a reader that has left, or a closed stream
            stream.flush()
    os._exit(status)


def version_option(program: str) -> Any:
    """Return the flag that prints versions, such as `mtp-worker 0.1.0, wire protocol 1, Python 3.11.7`, and exits."""

    def show(asked: bool) -> None:
        if asked:
            from proto.frame import VERSION  # here, because protobuf takes a tenth of the start of a command

            own, python = version("mtp-cluster"), platform.python_version()
            sys.stdout.write(f"{program} {own}, wire protocol {VERSION}, Python {python}\n")
            raise SystemExit

    return typer.Option("--version", callback=show, is_eager=True, help="Show versions and exit.")
