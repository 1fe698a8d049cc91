"""The process of a worker that holds a stage together with processes of other workers.

A collective can wait without end for a member that is lost, and MLX cannot leave a group. So the stage of a group runs
in a process of its own, which can be killed. It serves the same calls as a worker, at a port of its own. The worker
keeps spare processes, which have done their imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial

from proto import cluster_pb2 as pb
from proto.announcement import join_address
from proto.errors import NotReadyError
from proto.rpc.listener import BackgroundTasks

log = logging.getLogger(__name__)

MAX_LINE = 2**20
"""Bytes. Longest line of a member's log, such as one with a traceback."""

START_SECONDS = 60.0
"""Seconds. Bound of the start of a process, which imports MLX: 2 s on an idle machine."""

END_SECONDS = 10.0
"""Seconds. Bound of the end of a killed process, which a GPU driver may keep longer."""

SPARES = 2
"""Spare processes of a worker. On busy CPUs the imports of one take up to 9 s, in which a second failure may come."""

SPARE_SECONDS = 3.0
"""Seconds from the start of a member process to that of a spare one. The first measures its link before."""

PROGRAM = (
    sys.executable,
    "-P",
    "-c",
    "from worker.cli import main; main()",
    "--member",
)
"""The command of a member process, to which the flags of its worker are added."""

ENVIRONMENT = {"MLX_USE_CUDA_GRAPHS": "0"}
"""Settings of a member process. MLX builds a CUDA graph anew for each collective in it, which takes longer than to
launch its kernels one by one: with 27B on two H200s a step of a group takes .58 of the time."""


def group_address(host: str, port: int = 0) -> str:
    """Return host:port for the connections of a group, with a free port of `host` for 0. Raises OSError for a used one.

    MLX binds the port later, so another program may take a free one before. One that the user gives is kept for it.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return join_address(host, probe.getsockname()[1])


def report_ready(port: int, address: str, rdma: str) -> None:
    """Print the fields of a MemberReply in one line for the worker, and end this process when the worker ends."""
    ready = {"port": port, "group_address": address, "rdma": rdma}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    when_stdin_ends(partial(os._exit, 0))  # the engine thread may wait in a collective


def when_stdin_ends(action: Callable[[], object]) -> None:
    """Call `action`, on a thread, when the program that started this one ends, and with it the standard input."""

    def wait_for_end() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 64):
                pass
        with contextlib.suppress(RuntimeError):  # the loop is closed
            action()

    threading.Thread(target=wait_for_end, name="owner-watch", daemon=True).start()


async def relay_log(stream: asyncio.StreamReader, pid: int) -> None:
    """Log the records of a member, which are JSON, in the log of this process. Other lines are those of libraries."""
    while True:
        try:
            line = (await stream.readline()).decode(errors="replace")
        except ValueError:  # longer than MAX_LINE
            continue
        if not line:
            return
        try:
            record = json.loads(line)
            level, name, text = record.pop("level").upper(), record.pop("logger"), record.pop("message")
            extra = {key: value for key, value in record.items() if key != "time"} | {"member": pid}
            logging.getLogger(name).log(logging.getLevelNamesMapping()[level], "%s", text, extra=extra)
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("%s", line.rstrip(), extra={"member": pid})


_background = BackgroundTasks()


class MemberProcess:
    """A member process. It waits until `serve` is called."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls, flags: tuple[str, ...]) -> MemberProcess:
        """Start a process, and return before its imports are done."""
        process = await asyncio.create_subprocess_exec(
            *PROGRAM,
            *flags,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE,
            env={**ENVIRONMENT, **os.environ},
            start_new_session=True,  # Ctrl-C drains the worker, which ends this process afterwards
        )
        assert process.stderr is not None
        _background.spawn(relay_log(process.stderr, process.pid))
        return cls(process)

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self._process.returncode is None

    async def serve(self) -> pb.MemberReply:
        """Return where the process listens from now on. Ends it and raises NotReadyError if it does not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                self._process.stdin.write(b"serve\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
            return pb.MemberReply(**json.loads(line))
        except BaseException as error:
            await self.stop()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise NotReadyError(
                "the process for a group did not start. The log of the worker has its error."
            ) from error

    async def stop(self) -> None:
        """Kill the process, which may be stuck, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
