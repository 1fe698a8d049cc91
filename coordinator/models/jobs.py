"""Jobs on models. Each job is a process of its own, so that it cannot disturb the serving of answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections import deque
from dataclasses import replace
from typing import Any

from coordinator.status.job_status import JobKind, JobStatus
from proto.errors import CapacityError, UsageError

log = logging.getLogger(__name__)

MAX_JOBS = 20
"""Jobs kept for a page that opens later."""

PROCESS = "coordinator.models.job_process"
"""The module that does the work of one job."""

END_SECONDS = 5.0
"""Seconds. Longest wait for a cancelled process, which ends at the next tensor."""

MAX_LINE_BYTES = 1 << 16
"""Bytes of one line of a job's output."""


class JobRunner:
    """The jobs of a server, one at a time: two conversions at once would need twice the memory."""

    def __init__(self) -> None:
        self.jobs: deque[JobStatus] = deque(maxlen=MAX_JOBS)
        self._count = 0
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    def start_job(
        self, kind: JobKind, model: str, target: str, arguments: dict[str, Any]
    ) -> JobStatus:
        """Start a job with the JSON `arguments` of its process. Raises CapacityError while another one runs."""
        if self._task is not None and not self._task.done():
            raise CapacityError("a job is running. Wait for its end, or cancel it")
        self._count += 1
        job = JobStatus(self._count, kind, model, target, round(time.time(), 1))
        self.jobs.append(job)
        self._task = asyncio.create_task(self._run(job.number, {"kind": kind, **arguments}))
        log.info("job started", extra={"job": kind, "model": model})
        return job

    def cancel_job(self, number: int) -> None:
        """End the running job `number`. The same job continues later where it ended. Raises UsageError if it ended."""
        if not self.jobs or self.jobs[-1].number != number or self.jobs[-1].state != "running":
            raise UsageError(f"job {number}: it does not run")
        self._update(number, state="cancelled")
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """End the running job."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=2 * END_SECONDS)

    async def _run(self, number: int, arguments: dict[str, Any]) -> None:
        """Run the process of one job, and record its progress and result."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            PROCESS,
            json.dumps(arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
        )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                self._update(number, **_fields(line))
            await process.wait()
        finally:
            await _end_process(process)
        if self._state(number) == "running":
            self._update(number, state="failed", detail="the job's process ended early")
        log.info("job ended", extra={"state": self._state(number)})

    def _state(self, number: int) -> str:
        return next((job.state for job in self.jobs if job.number == number), "")

    def _update(self, number: int, **fields: Any) -> None:
        for index, job in enumerate(self.jobs):
            if job.number == number:
                self.jobs[index] = replace(job, **fields)


def _fields(line: bytes) -> dict[str, Any]:
    """Return the fields of a JobStatus that one line of a job's output changes."""
    message: dict[str, Any] = json.loads(line)
    return {name: message[name] for name in ("done", "total", "state", "detail") if name in message}


async def _end_process(process: asyncio.subprocess.Process) -> None:
    """End a process that still runs: politely, then by force."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
