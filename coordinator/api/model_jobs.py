"""The administration of models: those on this machine, the search of the hub, the fit, and downloads."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from coordinator.api.model_catalog import Catalog, ModelFacts, ModelFit, describe_model, fit_model
from coordinator.cluster.plan import NodeSpec
from coordinator.status.cluster_status import JobStatus
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.remote_checkpoint import open_model
from mtp.checkpoint.hub.resolve import resolve_model
from mtp.checkpoint.hub.search import FoundRepo, search_hub
from proto.errors import CapacityError, ClusterError, DeadlineError, UsageError

log = logging.getLogger(__name__)

MAX_JOBS = 20
"""Downloads kept for a page that opens later."""

END_SECONDS = 5.0
"""Seconds. Longest wait for a cancelled download, which ends at the next block of a file."""


class Downloads:
    """The downloads of a server, one at a time, on a thread. A repeated download continues where the earlier ended."""

    def __init__(self) -> None:
        self.jobs: deque[JobStatus] = deque(maxlen=MAX_JOBS)
        self._count = 0
        self._stop = threading.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, model: str) -> JobStatus:
        """Start to download a repo. Raises CapacityError while another download runs."""
        if self._task is not None and not self._task.done():
            raise CapacityError("a download is running. Wait for its end, or cancel it")
        self._count += 1
        self.jobs.append(JobStatus(self._count, model))
        self._stop = threading.Event()
        self._task = asyncio.create_task(self._run(model, self._stop))
        return self.jobs[-1]

    def cancel(self, number: int) -> None:
        """End the running download `number`. Raises UsageError if it has ended."""
        if not self.jobs or self.jobs[-1].number != number or self.jobs[-1].state != "running":
            raise UsageError(f"job {number}: it does not run")
        self._stop.set()

    async def close(self) -> None:
        """End the running download."""
        self._stop.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=END_SECONDS)

    async def _run(self, model: str, stop: threading.Event) -> None:
        def show(done: int, total: int) -> None:
            """Record the progress."""
            self._update(done=done, total=total)

        try:
            await asyncio.to_thread(resolve_model, model, show, stop)
        except Exception as error:
            known = isinstance(error, ClusterError)
            if not known:
                log.exception("download failed", extra={"model": model})
            detail = error.public if isinstance(error, ClusterError) else "internal error"
            state = "cancelled" if stop.is_set() else "failed"
            self._update(state=state, detail="" if stop.is_set() else detail)
        else:
            self._update(state="done")
        log.info("download ended", extra={"model": model, "state": self.jobs[-1].state})

    def _update(self, **fields: Any) -> None:
        self.jobs[-1] = replace(self.jobs[-1], **fields)


HUB_SECONDS = 15.0
"""Seconds. Bounds a search, and reading the headers of a repo: the largest one has a few MB of them."""

DISK_SECONDS = 30.0
"""Seconds. Bounds reading the headers of all models on a cold disk."""

T = TypeVar("T")


class ModelAdmin:
    """The models of one server. `nodes()` returns the machines that a plan may use now, `served` the model's name."""

    def __init__(
        self, catalog: Catalog, served: str, nodes: Callable[[], Sequence[NodeSpec]]
    ) -> None:
        self.catalog = catalog
        self.served = served
        self.downloads = Downloads()
        self._nodes = nodes
        self._reading = asyncio.Lock()
        """Only one thread reads at a time, because a thread cannot be cancelled."""

    async def list_models(self) -> list[ModelFacts]:
        """Return the models on this machine. Raises DeadlineError."""
        return await self._in_thread(self.catalog.list_models, DISK_SECONDS, "reading the models")

    async def search(self, query: str) -> list[FoundRepo]:
        """Return the repos on the hub whose name contains `query`. Raises CheckpointError and DeadlineError."""
        return await self._in_thread(lambda: search_hub(query), HUB_SECONDS, "the hub")

    async def fit(self, name: str) -> tuple[ModelFacts, ModelFit]:
        """Return the facts of a model and its fit on this cluster. Reads headers only, from the hub if needed.

        Raises CheckpointError and DeadlineError.
        """
        nodes = self._nodes()

        def read() -> tuple[ModelFacts, ModelFit]:
            """Open the checkpoint and plan it."""
            path = self.catalog.find_path(name)
            checkpoint = open_model(name) if path is None else Checkpoint.open(path)
            facts = describe_model(name, checkpoint)
            fit = ModelFit(problem=facts.problem) if facts.problem else fit_model(checkpoint, nodes)
            return facts, fit

        return await self._in_thread(read, HUB_SECONDS, f"reading {name}")

    def download(self, model: str) -> JobStatus:
        """Start to download a repo. Raises CheckpointError for an unknown name, and CapacityError."""
        self.catalog.find_path(model)
        return self.downloads.start(model)

    async def _in_thread(self, read: Callable[[], T], seconds: float, what: str) -> T:
        try:
            async with asyncio.timeout(seconds):
                async with self._reading:
                    return await asyncio.to_thread(read)
        except TimeoutError:
            raise DeadlineError(f"{what}: no answer within {seconds:g} s. Try again") from None
