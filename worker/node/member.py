"""The process of a worker that holds a stage together with processes of other workers.

A collective can wait without end for a member that is lost, and MLX cannot leave a group. So the stage of a group runs
in a process of its own, which can be killed. It serves the same calls as a worker, at a port of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading

from proto import cluster_pb2 as pb
from proto.announcement import join_address
from proto.errors import NotReadyError

START_SECONDS = 60.0
"""Seconds. Bound of the start of a process, which imports MLX: 2 s on an idle machine."""

STOP_SECONDS = 3.0
"""Seconds after SIGTERM before a process is killed."""

PROGRAM = (sys.executable, "-P", "-c", "from worker.cli import main; main()", "--member")
"""The command of a member process, to which the flags of its worker are added."""

ENVIRONMENT = {"MLX_USE_CUDA_GRAPHS": "0"}
"""Settings of MLX in a member process. MLX builds a CUDA graph anew for each collective in it, which takes longer than
to launch its kernels one by one: with 27B on two H200s a step of a group takes .58 of the time."""


def free_group_address(host: str) -> str:
    """Return host:port with a free port of `host`, for the connections of a group."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return join_address(host, probe.getsockname()[1])


def report_ready(port: int, host: str, rdma: str) -> None:
    """Print the fields of a MemberReply in one line for the worker, and end this process when the worker ends."""
    ready = {"port": port, "group_address": free_group_address(host), "rdma": rdma}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()

    def wait_for_end() -> None:
        """Wait for the end of standard input, which the worker holds open while it lives."""
        with contextlib.suppress(OSError):
            while os.read(0, 64):
                pass
        os._exit(0)  # the engine thread may wait in a collective

    threading.Thread(target=wait_for_end, name="worker-watch", daemon=True).start()


class MemberProcess:
    """A running member process."""

    def __init__(self, process: asyncio.subprocess.Process, ready: pb.MemberReply) -> None:
        self.ready = ready
        self._process = process

    @classmethod
    async def start(cls, flags: tuple[str, ...]) -> MemberProcess:
        """Start a process and wait until it listens. Raises NotReadyError if it does not."""
        process = await asyncio.create_subprocess_exec(
            *PROGRAM,
            *flags,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**ENVIRONMENT, **os.environ},
            start_new_session=True,  # Ctrl-C drains the worker, which ends this process afterwards
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await process.stdout.readline()
            return cls(process, pb.MemberReply(**json.loads(line)))
        except (TimeoutError, ValueError, TypeError) as error:
            await _end(process)
            raise NotReadyError(
                "the process for a group did not start. The log of the worker has its error."
            ) from error
        except BaseException:
            await _end(process)
            raise

    async def stop(self) -> None:
        """End the process, within STOP_SECONDS also if it is stuck."""
        await _end(self._process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
