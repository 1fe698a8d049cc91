"""The generation loop: requests into the scheduler, frames to the pipeline, outcomes back to whoever waits.

It knows nothing of tokenization, HTTP or where the stages run. When a pipeline fails, every live sequence is kept
as its tokens, and fed again to the next one; clients see a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from coordinator.generation.frame_log import log_frame
from coordinator.generation.in_flight import Settlement
from coordinator.generation.meter import Meter
from coordinator.generation.request import Finished, GenerationEvent, GenerationRequest
from coordinator.generation.scheduler import Scheduler
from coordinator.generation.sequence import Sequence
from coordinator.pipeline.base import Pipeline, PipelineSource
from proto.errors import ClusterError, NotReadyError, StaleEpochError
from proto.frame import Frame

log = logging.getLogger(__name__)

MOST_FAILURES = 4
"""Pipelines that may fail in a row before their requests are taken for the cause."""

RETRY_SECONDS = 1.0
"""Pause after a wait for a plan was in vain, lest a source that fails at once is asked without end."""


class GenerationLoop:
    """Serves requests over the pipelines a source gives. `start` and `close` bracket its life.

    Everything but the pipeline runs on the event loop's thread, so the scheduler needs no lock.
    """

    def __init__(
        self,
        source: PipelineSource,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self.scheduler = scheduler
        self.clock = clock
        self.pipeline: Pipeline | None = None
        self._listeners: dict[int, tuple[Sequence, asyncio.Queue[GenerationEvent]]] = {}
        self._task: asyncio.Task[None] | None = None
        self.meter = Meter()
        self.recoveries = 0
        self._failures = 0
        """Pipelines lost since one last gave a frame back."""
        self._rebuilding: list[Sequence] = []
        """Those that lived through a change of plan and have not had a token since."""

    # ---- life

    async def start(self) -> None:
        """Acquire the first pipeline and begin to serve. Raises ClusterError when there is none to be had."""
        await self._adopt(await self.source.acquire())
        self._task = asyncio.create_task(self._serve(), name="generation loop")

    async def close(self) -> None:
        """End every open request with an error and stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._fail_all("the server is shutting down")
        if self.pipeline is not None:
            await self.pipeline.close()
            self.pipeline = None

    # ---- requests

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `coordinator.generation.request.Generator`."""
        if self._task is None or self._task.done():
            raise NotReadyError("this server is not serving: it is starting or shutting down")
        sequence = self.scheduler.submit(request, self.clock())
        queue: asyncio.Queue[GenerationEvent] = asyncio.Queue()
        self._listeners[sequence.seq_id] = sequence, queue
        log.debug("request queued", extra={"seq_id": sequence.seq_id, "id": request.request_id})
        try:
            self._pump()
            while True:
                event = await queue.get()
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            del self._listeners[sequence.seq_id]
            self._abandon(sequence.seq_id)

    def _abandon(self, seq_id: int) -> None:
        """Nobody waits for a sequence any more; one that has finished is gone already."""
        if self.pipeline is not None and self.scheduler.may_skip(seq_id):
            self.pipeline.cancel(seq_id)
        self.scheduler.cancel(seq_id)
        self._pump()

    # ---- the loop

    async def _serve(self) -> None:
        """Receive for as long as the server lives, over one pipeline after another."""
        while True:
            if self.pipeline is None:
                await self._find_pipeline()
                continue
            try:
                self._take(await self.pipeline.receive())
            except ClusterError as error:
                await self._give_up(self.pipeline, error)
                continue
            except Exception as error:  # a bug of ours: what it touched cannot be trusted any more
                log.exception("the generation loop failed")
                self._fail_all("the server failed on one of the requests it was serving")
                await self._give_up(self.pipeline, ClusterError(f"{type(error).__name__}: {error}"))

    def _take(self, frame: Frame) -> None:
        """A frame came back: hear what it says, send what follows, tell who waits."""
        now = self.clock()
        settlement = self.scheduler.settle(frame, now)
        self._failures = 0
        # The stages first: they idle until they hear, and telling clients costs as much as a hop.
        try:
            self._reject(settlement)
            self._pump()
            self.meter.observe(frame, settlement, now)
            log_frame(frame)
        finally:  # what is settled will not be told again
            self._deliver(settlement)
        self._note_rebuilt()

    async def _give_up(self, pipeline: Pipeline, error: ClusterError) -> None:
        """Leave a pipeline that failed. Requests that no pipeline survives end, lest they kill one after another."""
        log.warning("pipeline failed", extra={"epoch": pipeline.epoch, "error": str(error)})
        self.pipeline = None
        self.recoveries += 1
        # A plan that gave way to another did not fail.
        self._failures += not isinstance(error, StaleEpochError)
        if self._failures >= MOST_FAILURES:
            self._fail_all(f"{self._failures} plans in a row failed before they gave a token")
            self._failures = 0
        self.source.failed(pipeline, error)
        await pipeline.close()

    async def _find_pipeline(self) -> None:
        """Adopt the next pipeline. When none can be had in the source's time, end what waits, and try on."""
        try:
            await self._adopt(await self.source.acquire())
        except ClusterError as error:
            log.error("no plan can serve", extra={"error": str(error)})
            self._fail_all(error.public)
            await asyncio.sleep(RETRY_SECONDS)
        except Exception:  # a bug of ours: whoever waits must not wait for ever
            log.exception("no plan could be had")
            self._fail_all("the server failed while it looked for a plan")
            await asyncio.sleep(RETRY_SECONDS)

    async def _adopt(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        now = self.clock()
        self._rebuilding += self.scheduler.running.values()
        self._deliver(self.scheduler.reset(pipeline.stages, pipeline.epoch, pipeline.capacity, now))
        self._pump()

    def _note_rebuilt(self) -> None:
        """Say when the last of the answers that a change of plan held up goes on."""
        if not self._rebuilding:
            return
        still = [s for s in self._rebuilding if s.passed < s.goal and s.seq_id in self._listeners]
        self._rebuilding = still
        if not still:
            log.info("sequences rebuilt", extra={"epoch": self.scheduler.epoch})

    def _pump(self) -> None:
        """Send whatever may be sent now."""
        if self.pipeline is None:
            return
        while (frame := self.scheduler.next_frame(self.clock())) is not None:
            self.pipeline.send(frame)

    def _reject(self, settlement: Settlement) -> None:
        assert self.pipeline is not None
        for r in settlement.rejections:
            self.pipeline.rollback(r.seq_id, r.window, r.accepted_length, r.trim)

    def _deliver(self, settlement: Settlement) -> None:
        for seq_id, event in settlement.events:
            if seq_id in self._listeners:
                self._listeners[seq_id][1].put_nowait(event)

    def _fail_all(self, message: str) -> None:
        """End every open request with an error event: never a cut. Also one that has left the scheduler, whose end a
        failure has kept from its client; to others a second end says nothing."""
        now = self.clock()
        for sequence, events in self._listeners.values():
            events.put_nowait(Finished("error", sequence.stats(now), error=message))
        for sequence in [*self.scheduler.running.values(), *self.scheduler.waiting]:
            self.scheduler.cancel(sequence.seq_id)
