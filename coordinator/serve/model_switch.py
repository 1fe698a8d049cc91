"""The change of the served model without a restart: stop, load, serve.

The files of the next model are downloaded and opened while the present one serves. Then the present model ends, because
two large models do not fit one machine at once, and the next one loads. If that fails, the earlier model loads again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from coordinator.cluster.manager import ClusterManager
from coordinator.pipeline.pipeline import PipelineSource
from coordinator.serve.options import ServeOptions
from coordinator.serve.served_parts import OpenedModel, ServedParts, served_model
from coordinator.status.cluster_status import FINISH_SECONDS, LoadPhase, LoadReport
from coordinator.web.model_catalog import ModelFacts, ModelLoader, find_listed, list_models
from mtp.checkpoint.hub.missing_head import fetched_if_possible, with_fetched_head
from mtp.checkpoint.hub.resolve import resolve_model, snapshot_of
from proto import errors

log = logging.getLogger(__name__)

LIST_SECONDS = 10.0
"""Seconds for which the list of models is kept, because reading it takes many small reads of the disk."""

DISK_SECONDS = 30.0
"""Seconds. Bounds reading the headers of all models on a cold disk."""

POLL_SECONDS = 0.1
"""Seconds between two looks at the open answers."""


class Host(Protocol):
    """The server whose model changes."""

    options: ServeOptions
    manager: ClusterManager | None
    parts: ServedParts | None

    def make_parts(self, model: OpenedModel, source: PipelineSource) -> ServedParts:
        """Return the parts of a model, which do not serve yet."""

    def publish(self, parts: ServedParts) -> None:
        """Send all requests from now on to `parts`."""

    def pause_requests(self, reason: str) -> None:
        """Answer all requests from now on with 503 and `reason`."""


class ModelSwitch(ModelLoader):
    """The changes of the model of one server, one at a time."""

    def __init__(self, host: Host, first: OpenedModel) -> None:
        self._host = host
        self._reading = asyncio.Lock()
        """Only one thread reads the disk at a time, because a thread cannot be cancelled."""
        self._arguments = {first.name: first.options.model}
        """The models that were served, by name: their directory or repo."""
        self._listed: list[ModelFacts] = []
        self._listed_at = -math.inf
        self._report: LoadReport | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = threading.Event()
        self._serves = True  # not between two models, nor after neither could be loaded

    @property
    def report(self) -> LoadReport:
        parts = self._host.parts
        return self._report or LoadReport(parts.model.name if parts else "", "ready")

    def argument_of(self, name: str) -> str | None:
        """Return the directory or repo of a model on this machine, or None for an unknown or incomplete one."""
        if name in self._arguments:
            return self._arguments[name]
        try:
            return name if find_listed(name) else None
        except errors.ClusterError:
            return None

    def can_load(self, name: str) -> bool:
        return self.argument_of(name) is not None

    async def list_models(self) -> list[ModelFacts]:
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(DISK_SECONDS), self._reading:
                if clock() - self._listed_at > LIST_SECONDS:
                    self._listed = await asyncio.to_thread(list_models)
                    self._listed_at = clock()
        except TimeoutError:
            raise errors.DeadlineError(f"reading the models: no answer within {DISK_SECONDS:g} s. Try again") from None
        listed = {model.name for model in self._listed}
        served = [ModelFacts(name) for name in self._arguments if name not in listed]
        return [*served, *self._listed]

    def start(self, name: str) -> LoadReport:
        directory = name if Path(name).is_absolute() else None
        if directory is not None:
            if not (Path(directory) / "config.json").is_file():
                raise errors.CheckpointError(
                    f"model {directory!r:.200}: not found, or without config.json. Name a model on the server"
                )
            name = Path(directory).name
        if self._task is not None and not self._task.done():
            if self.report.model != name:
                raise errors.BusyError(f"the server changes to {self.report.model!r:.80}. Try again later")
            return self.report
        if self._host.parts is None:
            raise errors.NotReadyError("the server is starting. Try again later")
        same = name == self._host.parts.model.name and self._serves
        if same and directory in (None, self._arguments.get(name)):
            self._report = LoadReport(name, "ready")
            return self._report
        argument = directory or self.argument_of(name)
        if argument is None:
            find_listed(name)  # raises for a name that is not a repo
            argument = name
        self._report = LoadReport(name, "opening")
        self._task = asyncio.create_task(self._change(name, argument), name="change of the model")
        return self._report

    async def close(self) -> None:
        """Cancel a change in progress."""
        self._stop.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ---- one change

    async def _change(self, name: str, argument: str) -> None:
        before = self._host.parts
        assert before is not None
        try:
            path = await asyncio.to_thread(resolve_model, argument, self._show, self._stop)
            path = await asyncio.to_thread(with_fetched_head, path)
            if snapshot_of(path) and self._host.options.mtp.depth != 0:
                path = await asyncio.to_thread(fetched_if_possible, path, self._show)
            options = replace(self._host.options, model=argument)
            model = await asyncio.to_thread(OpenedModel, options, path, before.model.other_bytes)
            await self._check_fit(model)
            self._host.pause_requests(f"The server changes to the model {name}.")
            self._serves = False
            try:
                # After a change that failed both ways, the parts of `before` are closed already. That does no harm.
                await self._end_answers(before, name)
                await self._serve(model)
            except Exception as error:
                log.warning("loading the earlier model again", extra={"model": before.model.name})
                await self._serve_again(before.model, f"{name}: {_public(error)}")
                raise
        except Exception as error:
            known = isinstance(error, errors.ClusterError)
            level = logging.WARNING if known else logging.ERROR
            extra = {"model": name, "error": str(error)}
            log.log(level, "model not changed", extra=extra, exc_info=not known)
            self._report = LoadReport(name, "failed", error=_public(error))
        else:
            self._arguments[name] = argument
            self._listed_at = -math.inf
            self._set_phase("ready")
            log.info("model changed", extra={"model": name})

    async def _check_fit(self, model: OpenedModel) -> None:
        """Raise MemoryLimitError if neither the workers nor this process can serve `model`."""
        problem = model.why_not_alone
        if (manager := self._host.manager) is not None:
            problem = await manager.problem_with(served_model(model), model.why_not_alone)
        if problem:
            raise errors.MemoryLimitError(f"the cluster cannot serve {model.name}: {problem}")

    async def _serve(self, model: OpenedModel) -> None:
        """Load `model` on the workers, or in this process if there are none, and publish it."""
        self._set_phase("loading")
        manager = self._host.manager
        if manager is None:
            model.local.on_progress = self._show
            source: PipelineSource = model.local
        else:
            model.local.reserved_bytes = manager.local_worker_bytes
            await manager.change_model(served_model(model), model.local.make, model.why_not_alone)
            source = manager
        parts = self._host.make_parts(model, source)
        try:
            starting = asyncio.create_task(parts.start())
            while not starting.done():
                if manager is not None:
                    self._show(*manager.loads.totals)
                await asyncio.wait({starting}, timeout=POLL_SECONDS)
            starting.result()
        except BaseException:
            starting.cancel()
            await parts.close()
            raise
        self._host.publish(parts)
        self._serves = True

    async def _serve_again(self, model: OpenedModel, problem: str) -> None:
        """Serve the earlier model after the `problem` of the next one, or tell clients why no model is loaded."""
        try:
            await self._serve(model)
        except Exception as error:
            log.warning("no model is loaded", extra={"model": model.name, "error": str(error)})
            reasons = f"{problem.rstrip('.')}. {model.name}: {_public(error).rstrip('.')}"
            self._host.pause_requests(f"No model is loaded. {reasons}. Load one with mtp-coord load.")

    async def _end_answers(self, before: ServedParts, name: str) -> None:
        """Wait for the answers of `before`, at most FINISH_SECONDS, and close it."""
        self._set_phase("finishing answers")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_SECONDS):
                while True:
                    if not before.count_answers():
                        break
                    await asyncio.sleep(POLL_SECONDS)
        await before.close(
            errors.StaleEpochError(
                f"the server changed to the model {name}, and this answer did not end within {FINISH_SECONDS:g} s"
            )
        )

    def _set_phase(self, phase: LoadPhase) -> None:
        assert self._report is not None
        self._report = LoadReport(self._report.model, phase)

    def _show(self, done: int, total: int) -> None:
        assert self._report is not None
        self._report = replace(self._report, done=done, total=total)


def _public(error: Exception) -> str:
    """Return the text of an error for clients."""
    return error.public if isinstance(error, errors.ClusterError) else "internal error"
