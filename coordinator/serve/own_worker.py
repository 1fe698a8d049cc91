"""The worker of the coordinator's own machine: a process of its own, which is restarted when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.serve.options import JOIN_PORT, ServeOptions
from proto.announcement import UNSPECIFIED, is_loopback, join_address, parse_address
from proto.errors import UsageError
from proto.rpc.listener import bind_listener, reachable_address
from proto.state_dir import running_worker

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-P", "-c", "from worker.cli import main; main()", "--owned")

LOOPBACK = "127.0.0.1"

USUAL_PORT = 50505
"""The port of the own worker, if no other program listens there."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before the first restart and the longest ones, which double. A crash at each load must not fill the disk."""

STABLE_SECONDS = 120.0
"""Seconds of a run after which the next restart waits FIRST_PAUSE again."""

READY_SECONDS = 20.0
"""Seconds. Longest wait for the worker at the start of the server: its imports take 2 on an idle machine."""

END_SECONDS = 25.0
"""Seconds in which the worker may drain and end."""

MAX_LOG_BYTES = 8 * 2**20


def with_own_worker(options: ServeOptions) -> tuple[ServeOptions, OwnWorker | None]:
    """Return the options with the address of the own worker, and with the join server that other machines need.

    A worker of the user that runs here already is the own worker, since a second one would count the memory twice.
    Raises UsageError where this machine has no address for other machines, or where that worker cannot be used.
    """
    if not options.own_worker:
        return options, None
    others = (options.required_nodes or 1) > 1 + len(options.worker)
    if others and options.listen is None and not options.insecure:
        options = replace(options, listen=(reachable_address(), JOIN_PORT))
    host = options.listen[0] if options.listen else UNSPECIFIED[0] if others else LOOPBACK
    host = reachable_address() if host in UNSPECIFIED else host
    found = running_worker(options.state)
    if found and not found.get("owned"):  # else it ends, since its coordinator has ended
        name, at = found.get("name"), str(found.get("address", LOOPBACK))
        if options.own_layers:
            raise UsageError(f"--own-layers: the worker {name} at {at} runs on this machine. Stop it, or start it so")
        log.info("the worker that runs on this machine is used", extra={"worker": name, "pid": found.get("pid")})
        near, port = parse_address("--own-worker", at, USUAL_PORT)
        address = join_address(host if is_loopback(near) or near in UNSPECIFIED else near, port)
        known = (address,) if port else ()  # mDNS finds one that took any free port
        return replace(options, worker=(*options.worker, *known)), None
    address = join_address(host, _free_port(host))
    return replace(options, worker=(*options.worker, address)), OwnWorker.of(options, address)


def _free_port(host: str) -> int:
    for port in (USUAL_PORT, 0):
        with contextlib.suppress(UsageError), bind_listener("--own-worker", host, port) as found:
            return int(found.getsockname()[1])
    raise UsageError(f"--own-worker: no port of {host} is free. Give --listen another address")


@dataclass(frozen=True)
class OwnWorker:
    """The process with these flags. Its log is `log_file`, with the one before it in `.1`."""

    address: str
    flags: tuple[str, ...]
    log_file: Path

    @classmethod
    def of(cls, options: ServeOptions, address: str) -> OwnWorker:
        """Return the worker at `address` that `options` describe."""
        name = socket.gethostname().partition(".")[0]
        flags = ["--listen", address, "--name", name, "--no-mdns"]
        flags += ["--layers", str(options.own_layers)] if options.own_layers else []
        flags += ["--prefix-disk", f"{options.prefix_disk}B"] if options.prefix_disk else []
        flags += ["--kernels", options.kernels.value, "--state-dir", str(options.state)]
        flags += ["--no-wired-memory"] if options.no_wired_memory else []
        flags += ["--allow-sleep"] if options.allow_sleep else []
        flags += ["--log-level", options.log_level, "--log-format", options.log_format]
        flags += ["--insecure"] if options.insecure else []
        return cls(address, tuple(flags), options.state / "logs" / "own-worker.log")

    def limited_to(self, memory: int) -> OwnWorker:
        """Return the worker with a limit of `memory` bytes."""
        return replace(self, flags=(*self.flags, "--memory-limit", f"{memory}B"))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the process running while the block runs, and end it afterwards."""
        keeper = asyncio.create_task(self._keep(), name="own worker")
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.wait([keeper], timeout=2 * END_SECONDS)

    async def wait_until_it_listens(self) -> None:
        """Return when the worker listens, or after READY_SECONDS. Before, the cluster would report it as lost."""
        host, port = parse_address("--own-worker", self.address)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_SECONDS):
                while True:
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection(host, port)
                        writer.close()
                        return
                    await asyncio.sleep(0.1)

    async def _keep(self) -> None:
        pause = FIRST_PAUSE
        while True:
            began = time.monotonic()
            try:
                ended: dict[str, Any] = {"status": await self._run()}
            except OSError as error:  # such as a full disk, or no memory for a process
                ended = {"error": str(error)}
            if time.monotonic() - began > STABLE_SECONDS:
                pause = FIRST_PAUSE
            extra = {**ended, "seconds": pause, "log": str(self.log_file)}
            log.error("the worker of this machine ended. It starts again", extra=extra)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _run(self) -> int:
        """Run the process to its end, and return its status. Raises OSError if it cannot start."""
        process = await self._spawn()
        extra = {"pid": process.pid, "log": str(self.log_file)}
        log.info("the worker of this machine starts", extra=extra)
        try:
            return await process.wait()
        finally:
            await _end(process)

    async def _spawn(self) -> Process:
        self.log_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            if self.log_file.stat().st_size > MAX_LOG_BYTES:
                self.log_file.replace(self.log_file.with_suffix(".log.1"))
        with self.log_file.open("ab") as stream:
            return await asyncio.create_subprocess_exec(
                *PROGRAM,
                *self.flags,
                stdin=PIPE,  # it ends with this process
                stdout=stream,
                stderr=stream,
                start_new_session=True,  # Ctrl-C ends the answers first
            )


async def _end(process: Process) -> None:
    """End a process that may still run: ask it, and after END_SECONDS kill it."""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is None:
            process.kill()
            await process.wait()
