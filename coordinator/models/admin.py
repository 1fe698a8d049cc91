"""The administration of models: the catalog, the hub, the fit, and jobs. All waits have a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from coordinator.models.catalog import Catalog, ModelFacts, describe_model
from coordinator.models.fit import ModelFit, fit_model
from coordinator.models.jobs import JobRunner
from coordinator.planning.plan import NodeSpec
from coordinator.status.job_status import JobKind, JobStatus
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.remote_checkpoint import open_model
from mtp.checkpoint.hub.resolve import BUILTIN
from mtp.checkpoint.hub.search import FoundRepo, search_hub
from proto.errors import CheckpointError, DeadlineError

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
        self.jobs = JobRunner()
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

    def start_job(self, kind: JobKind, model: str, target: str, bits: int | None) -> JobStatus:
        """Start a job. `target` is the name of the converted model that it makes or changes; else it is empty.

        Raises CheckpointError for an unknown name, and CapacityError while another job runs.
        """
        path = self.catalog.find_path(model)
        source = model if path is None or model == BUILTIN else str(path)
        arguments: dict[str, str | int | None] = {"source": source, "bits": bits}
        match kind:
            case "convert":
                arguments["target"] = str(self.catalog.target_path(target))
            case "add-mtp":
                arguments["target"] = str(self._existing(target, changes=True))
            case "try-head":
                arguments["target"] = str(self._existing(model, changes=False))
        return self.jobs.start_job(kind, model, target, arguments)

    def _existing(self, name: str, *, changes: bool) -> str:
        """Return the directory of a model on this machine. One that `changes` must be a converted one."""
        path = self.catalog.find_path(name)
        if path is None:
            raise CheckpointError(
                f"model {name:.120}: it is not on this machine. Download it first"
            )
        if changes and path.parent != self.catalog.directory:
            raise CheckpointError(
                f"model {name:.120}: its files belong to the hub's cache or the package. Convert a checkpoint that has "
                "its head instead"
            )
        return str(path)

    async def _in_thread(self, read: Callable[[], T], seconds: float, what: str) -> T:
        try:
            async with asyncio.timeout(seconds):
                async with self._reading:
                    return await asyncio.to_thread(read)
        except TimeoutError:
            raise DeadlineError(f"{what}: no answer within {seconds:g} s. Try again") from None
