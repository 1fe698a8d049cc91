"""How both programs end and name themselves: what the person or script that starts them may rely on.

`mtp-worker` and `mtp-coord` agree on this as they agree on frames, so it lies in proto, where both may import
it. It owns the process's edge and nothing else: exit status, the one line on stderr, the version line.

    0    done
    1    a ClusterError: the cluster could not do it
    2    a UsageError, or flags that do not parse: change what was typed
    130  interrupted (Ctrl-C)
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from importlib.metadata import version

from proto.errors import ClusterError
from proto.frame import VERSION


def run(program: str, app: Callable[[], object]) -> None:
    """Call `app` and leave the process with the exit status its outcome deserves.

    A ClusterError is told in one line on stderr, without a traceback. Anything else that `app` raises is a
    bug and keeps its traceback.
    """
    try:
        app()
    except ClusterError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def version_line(program: str) -> str:
    """`mtp-worker 0.1.0, wire protocol 1, Python 3.11.7`: what a bug report needs first."""
    return (
        f"{program} {version('mtp-cluster')}, wire protocol {VERSION}, "
        f"Python {platform.python_version()}"
    )
