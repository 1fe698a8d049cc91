"""A process beside the server for jobs that a thread cannot do, because they take any time or memory.

Each job and each result is a line, so no object of the process is trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from subprocess import DEVNULL, PIPE

Process = subprocess.Popen[bytes]


def command_of(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that calls `main` of `module` with `arguments`."""
    return (sys.executable, "-P", "-c", f"from {module} import main; main()", *arguments)


async def start_process(command: tuple[str, ...]) -> Process:
    """Start `command` in a session of its own. Ctrl-C then ends the server, which ends the process."""
    return await asyncio.to_thread(
        subprocess.Popen, command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
    )


async def ask(process: Process, data: bytes) -> bytes:
    """Send `data`, and return the line that the process answers, or nothing if it has ended. Call it in turn.

    A caller that is cancelled ends the process, because the next answer would not be that of the next job.
    """
    answer = b""
    try:
        answer = await asyncio.to_thread(_ask, process, data)
        return answer
    finally:
        if not answer:
            await asyncio.to_thread(end, process)


def _ask(process: Process, data: bytes) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.write(data)
        process.stdin.flush()
    if not (answer := process.stdout.readline()):
        process.wait()  # for the exit code
    return answer


def end(process: Process) -> None:
    """End the process, and with it the thread that waits for its answer."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # text that was not sent
            if pipe is not None:
                pipe.close()
