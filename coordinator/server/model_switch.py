"""The change of the served model without a restart.

The files of the next model are downloaded and opened while the present one serves. If the memory of all machines has
room for both, the next model is also loaded while the present one serves. Otherwise the present model ends first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from coordinator.cluster.manager import ClusterManager
from coordinator.cluster.plan_start import LoadState
from coordinator.generation.loop import GenerationLoop
from coordinator.models.admin import ModelAdmin
from coordinator.models.catalog import ModelFacts
from coordinator.pipeline.base import PipelineSource
from coordinator.pipeline.local import LocalPipeline, LocalSource
from coordinator.planning.capacity import Capacity
from coordinator.server.model_parts import served_model
from coordinator.server.options import ServeOptions
from coordinator.server.served_parts import OpenedModel, ServedParts
from coordinator.status.load_report import LoadPhase, LoadReport
from mtp.checkpoint.hub.resolve import BUILTIN, resolve_model
from proto.errors import BusyError, ClusterError, MemoryLimitError, NotReadyError, StaleEpochError

log = logging.getLogger(__name__)

LIST_SECONDS = 10.0
"""Seconds for which the list of models is kept, because reading it takes many small reads of the disk."""

FINISH_SECONDS = 60.0
"""Seconds. Time for open answers to finish before the model changes. Later they end with an error."""

POLL_SECONDS = 0.1
"""Seconds between two looks at the open answers."""


class Host(Protocol):
    """The server whose model changes."""

    options: ServeOptions
    manager: ClusterManager | None
    parts: ServedParts | None

    def make_parts(self, model: OpenedModel, source: PipelineSource) -> ServedParts:
        """Return the parts of a model, which do not serve yet."""
        ...

    def publish(self, parts: ServedParts) -> None:
        """Send all requests from now on to `parts`."""
        ...

    def pause_requests(self, reason: str, *, hold: bool) -> None:
        """Answer all requests from now on with 503 and `reason`, or with `hold` let them wait for the next parts."""
        ...


class ModelSwitch:
    """The changes of the model of one server, one at a time."""

    def __init__(self, host: Host, admin: ModelAdmin, first: OpenedModel) -> None:
        self._host = host
        self._admin = admin
        self._catalog = admin.catalog
        self._arguments = {first.name: first.options.model}
        """The models that were served, by name: their directory or repo."""
        self._listed: list[ModelFacts] = []
        self._listed_at = -math.inf
        self._report: LoadReport | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = threading.Event()
        self._serves = True
        """False between two models, and after neither of them could be loaded."""

    @property
    def report(self) -> LoadReport:
        """The change in progress, or the last one."""
        return self._report or LoadReport(_name_of(self._host), "ready")

    def argument_of(self, name: str) -> str | None:
        """Return the directory or repo of a model on this machine, or None for an unknown or incomplete one."""
        if name in self._arguments:
            return self._arguments[name]
        try:
            path = self._catalog.find_path(name)
        except ClusterError:
            return None
        if path is None or name == BUILTIN or path.parent != self._catalog.directory:
            return None if path is None else name
        return str(path)

    def can_load(self, name: str) -> bool:
        """See ModelLoader."""
        return self.argument_of(name) is not None

    async def list_models(self) -> list[ModelFacts]:
        """See ModelLoader."""
        now = asyncio.get_running_loop().time()
        if now - self._listed_at > LIST_SECONDS:
            found = await self._admin.list_models()
            self._listed = [model for model in found if not model.problem]
            self._listed_at = now
        listed = {model.name for model in self._listed}
        served = [ModelFacts(name) for name in self._arguments if name not in listed]
        return [*served, *self._listed]

    def start(self, name: str) -> LoadReport:
        """Begin to change to the model `name`, downloaded if needed, and return the report.

        Raises CheckpointError for an invalid name, and BusyError while another change runs.
        """
        if self._task is not None and not self._task.done():
            if self.report.model != name:
                raise BusyError(f"the server changes to {self.report.model!r:.80}. Try again later")
            return self.report
        if self._host.parts is None:
            raise NotReadyError("the server is starting. Try again later")
        if name == self._host.parts.model.name and self._serves:
            self._report = LoadReport(name, "ready")
            return self._report
        argument = self.argument_of(name)
        if argument is None:
            self._catalog.find_path(name)  # raises for a name that is not a repo
            argument = name
        self._report = LoadReport(name, "opening")
        self._task = asyncio.create_task(self._change(name, argument), name="change of the model")
        return self._report

    async def load(self, name: str) -> None:
        """Change to the model `name` and return when it serves. Raises ClusterError if it cannot."""
        while True:
            try:
                self.start(name)
            except BusyError:
                assert self._task is not None
                await asyncio.wait({self._task})
                continue
            break
        if self._task is not None:
            await asyncio.wait({self._task})
        if self.report.phase == "failed":
            raise NotReadyError(self.report.error)

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
            model = await asyncio.to_thread(self._open, argument, path)
            if self._host.manager is None:
                await self._change_alone(before, model)
            else:
                await self._change_cluster(self._host.manager, before, model)
        except Exception as error:
            known = isinstance(error, ClusterError)
            log.log(
                logging.WARNING if known else logging.ERROR,
                "model not changed",
                extra={"model": name, "error": str(error)},
                exc_info=not known,
            )
            text = error.public if isinstance(error, ClusterError) else "internal error"
            note = self._report.note if self._report else ""
            self._report = LoadReport(name, "failed", error=text, note=note)
        else:
            self._arguments[name] = argument
            self._set_phase("ready")
            log.info("model changed", extra={"model": name})

    def _open(self, argument: str, path: Path) -> OpenedModel:
        return OpenedModel(replace(self._host.options, model=argument), path)

    async def _change_alone(self, before: ServedParts, model: OpenedModel) -> None:
        """Change the model of this process, with both in memory if they fit."""
        if model.why_not_alone:
            raise MemoryLimitError(model.why_not_alone)
        used = before.model.local.status().memory_used
        try:
            model.local.model.capacity(used)
        except MemoryLimitError as error:
            self._report_end_first(error)
            await self._finish_answers(before, model, hold=False)
            await self._start_or_return(before, partial(self._start_alone, model))
            return
        model.local.reserved_bytes = lambda: used
        parts = await self._start_alone(model)
        model.local.reserved_bytes = lambda: 0
        self._host.publish(parts)
        await self._end_answers(before, model.name)
        parts.loop.use_capacity(model.local.use_all_memory())

    async def _start_alone(self, model: OpenedModel) -> ServedParts:
        self._set_phase("loading")
        source = LocalSource(partial(model.local.make, on_progress=self._show))
        parts = self._host.make_parts(model, source)
        await self._start_parts(parts)
        return parts

    async def _change_cluster(
        self, manager: ClusterManager, before: ServedParts, model: OpenedModel
    ) -> None:
        """Change the model of the workers, or of this process if there are none."""
        served = served_model(model.checkpoint, model.options, model.mode)
        if problem := await manager.problem_with(served, model.why_not_alone):
            raise MemoryLimitError(f"the cluster cannot serve {model.name}: {problem}")
        try:
            kept = await self._load_ahead(manager, before, model)
            model.local.reserved_bytes = manager.local_worker_bytes
            await self._finish_answers(before, model, hold=kept)
            await self._start_or_return(before, partial(self._start_cluster, manager, model))
        finally:
            manager.end_load_ahead()
            await model.local.drop_ahead()

    async def _load_ahead(
        self, manager: ClusterManager, before: ServedParts, model: OpenedModel
    ) -> bool:
        """Load the model beside the present one, which serves meanwhile. Return False if that is not possible."""
        loop = before.loop
        try:
            if manager.view.usable():
                served = served_model(model.checkpoint, model.options, model.mode)
                ahead = await manager.plan_ahead(served)
                await self._make_room(loop, ahead.room)
                self._set_phase("loading")
                await self._show_loads(asyncio.create_task(ahead.run()), lambda: ahead.loads)
            else:
                used = before.model.local.status().memory_used
                model.local.model.capacity(used)  # raises MemoryLimitError
                model.local.reserved_bytes = lambda: used + manager.local_worker_bytes()
                self._set_phase("loading")
                await model.local.make_ahead(manager.view.epoch + 1, self._show)
        except ClusterError as error:
            loop.limit_room(loop.scheduler.capacity)
            self._report_end_first(error)
            return False
        self._add_note("the present model serves until the next one is loaded")
        return True

    async def _make_room(self, loop: GenerationLoop, room: Capacity) -> None:
        """Let the requests of the present model keep to `room`. Raises MemoryLimitError if open ones take too long."""
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                while True:
                    if loop.limit_room(room):
                        return
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise MemoryLimitError("the open answers need the memory of the next model") from None

    async def _show_loads(self, task: asyncio.Task[None], loads: Callable[[], LoadState]) -> None:
        """Report the progress of the workers until `task` has ended, and raise its error."""
        try:
            while not task.done():
                self._show(*loads().totals)
                await asyncio.wait({task}, timeout=POLL_SECONDS)
        finally:
            task.cancel()
        task.result()

    async def _start_cluster(self, manager: ClusterManager, model: OpenedModel) -> ServedParts:
        self._set_phase("loading")
        served = served_model(model.checkpoint, model.options, model.mode)
        await manager.change_model(served, model.local.make, model.why_not_alone)
        parts = self._host.make_parts(model, manager)
        starting = asyncio.create_task(self._start_parts(parts))
        await self._show_loads(starting, lambda: manager.loads)
        if isinstance(parts.loop.pipeline, LocalPipeline):
            parts.loop.use_capacity(model.local.use_all_memory())
        return parts

    async def _start_or_return(
        self, before: ServedParts, start: Callable[[], Coroutine[Any, Any, ServedParts]]
    ) -> None:
        """Publish the parts that `start` makes. If that fails, load the model from before again, and raise."""
        try:
            self._publish(await start())
        except Exception:
            log.warning("loading the earlier model again", extra={"model": before.model.name})
            if self._host.manager is None:
                self._publish(await self._start_alone(before.model))
            else:
                self._publish(await self._start_cluster(self._host.manager, before.model))
            raise

    def _publish(self, parts: ServedParts) -> None:
        self._host.publish(parts)
        self._serves = True

    async def _start_parts(self, parts: ServedParts) -> None:
        try:
            await parts.start()
        except BaseException:
            await parts.close()
            raise

    async def _finish_answers(self, before: ServedParts, model: OpenedModel, *, hold: bool) -> None:
        self._host.pause_requests(f"The server changes to the model {model.name}.", hold=hold)
        self._serves = False
        # After a change that failed both ways, the parts of `before` are closed already. That does no harm.
        await self._end_answers(before, model.name)

    async def _end_answers(self, before: ServedParts, name: str) -> None:
        """Wait for the answers of `before`, at most FINISH_SECONDS, and close it."""
        self._set_phase("finishing answers")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_SECONDS):
                while True:
                    if not before.count_answers():
                        break
                    await asyncio.sleep(POLL_SECONDS)
        await before.close(StaleEpochError(f"the server changed to the model {name}"))

    def _set_phase(self, phase: LoadPhase) -> None:
        assert self._report is not None
        self._report = LoadReport(self._report.model, phase, note=self._report.note)

    def _report_end_first(self, error: ClusterError) -> None:
        """Say that the present model ends before the next one loads."""
        log.warning(
            "the present model ends before the next one loads", extra={"reason": str(error)}
        )
        self._add_note(f"the present model ends before the next one loads: {error.public}")

    def _add_note(self, note: str) -> None:
        assert self._report is not None
        self._report = replace(self._report, note=note)

    def _show(self, done: int, total: int) -> None:
        assert self._report is not None
        self._report = replace(self._report, done=done, total=total)


def _name_of(host: Host) -> str:
    return host.parts.model.name if host.parts else ""
