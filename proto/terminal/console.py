"""The exit status, the error line and the version line of both programs.

0    success
1    a ClusterError
2    a UsageError, or flags that do not parse: change the command line
130  interrupted (Ctrl-C)
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import NoReturn

from proto.errors import ClusterError
from proto.frame import VERSION
from proto.terminal.open_files import keep_open_file_limit, raise_open_file_limit


def run(program: str, app: Callable[[], object]) -> None:
    """Call `app` and exit the process with the status for its result.

    A ClusterError prints one line on stderr, without a traceback. Any other exception is a bug and keeps its
    traceback.
    """
    raise_open_file_limit()
    keep_open_file_limit()
    try:
        app()
    except ClusterError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def run_process(program: str, app: Callable[[], object]) -> NoReturn:
    """Call `run`, and end the process without Python's finalization.

    Finalization aborts the process (exit status -6) while a thread still computes with MLX: the destructors of its
    streams find their threads running. A worker that leaves does not wait for a long frame.
    """
    status: object = 0
    try:
        run(program, app)
    except SystemExit as end:
        status = end.code
    if not isinstance(status, int):
        sys.stderr.write(f"{status}\n" if status else "")
        status = 1 if status else 0
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a reader that has left, or a closed stream
            stream.flush()
    os._exit(status)


def version_line(program: str) -> str:
    """Return the versions that a bug report needs: `mtp-worker 0.1.0, wire protocol 1, Python 3.11.7`."""
    return (
        f"{program} {version('mtp-cluster')}, wire protocol {VERSION}, "
        f"Python {platform.python_version()}"
    )
