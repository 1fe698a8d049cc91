"""The generation loop: it passes requests to the scheduler, frames to the pipeline, and events to the clients.

The loop knows nothing of tokenization, HTTP or the place where stages run. When a pipeline fails, the loop keeps every
running request as its tokens and continues it on the next pipeline. Clients see a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

from coordinator.pipeline.pipeline import Pipeline, PipelineSource
from coordinator.schedule.backup_transfer import BackupTransfer
from coordinator.schedule.request import Finished, GenerationEvent, GenerationRequest, Generator
from coordinator.schedule.scheduler import FrameOutcome, Scheduler
from coordinator.schedule.sequence import Sequence
from coordinator.status.cluster_status import ClusterStatus, PrefillStatus
from coordinator.status.frame_records import FrameRecords
from coordinator.status.frame_trace import COORDINATOR, ProcessTrace
from proto.errors import ClusterError, NotReadyError, StaleEpochError
from proto.frame import Frame
from proto.frame_stamps import CoordinatorStep, FrameStamps

log = logging.getLogger(__name__)

METAL = "[METAL]"
"""Start of MLX's error text for a failed command buffer."""

CAUSES = ("Timeout", "Impacting Interactivity", "ImpactingInteractivity", "OutOfMemory")
"""Metal's names for work that took too long, or needed too much memory. Shorter chunks help against each."""


def is_gpu_timeout(message: str) -> bool:
    """Return whether the text of a pipeline's error names a chunk that was too long for a Metal GPU."""
    return METAL in message and any(cause in message for cause in CAUSES)


MAX_FAILURES = 4
"""Consecutive pipeline failures after which the running requests are failed, because one of them may be the cause."""

Deliver = Callable[[GenerationEvent], None]
"""The function that takes the events of one request."""

RETRY_SECONDS = 1.0
"""Seconds. Delay before retrying `acquire`, to avoid a busy loop on a source that fails at once."""


class GenerationLoop(Generator):
    """A server of requests over the pipelines of a source. Call `start` before and `close` after its use.

    All its code runs on one thread, so the scheduler needs no lock. `describe_wait` says what the source waits for.
    """

    def __init__(
        self,
        source: PipelineSource,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
        describe_wait: Callable[[], str] = str,
    ) -> None:
        self.source = source
        self._describe_wait = describe_wait
        self.scheduler = scheduler
        self.clock = clock
        self.pipeline: Pipeline | None = None
        self._listeners: dict[int, tuple[Sequence, Deliver]] = {}
        self._task: asyncio.Task[None] | None = None
        self._backups = BackupTransfer(scheduler, clock)
        self.frames = FrameRecords()
        self.recoveries = 0
        self._failures = 0  # of pipelines since a frame last returned

    # ---- life

    async def start(self) -> None:
        """Acquire the first pipeline and begin to serve. Raises ClusterError if the source has none."""
        self._adopt_pipeline(await self.source.acquire())
        self._task = asyncio.create_task(self._serve(), name="generation loop")

    async def close(self, reason: str = "the server is shutting down") -> None:
        """End every open request with the error `reason` and stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._backups.close()
        self._fail_requests(reason)
        if self.pipeline is not None:
            await self.pipeline.close()
            self.pipeline = None

    def status(self) -> ClusterStatus:
        """Return the figures of the loop. The server adds the model and the machines."""
        scheduler, frames, now = self.scheduler, self.frames, self.clock()
        running, pace = scheduler.running.values(), scheduler.prompts.expected_seconds(1)
        return ClusterStatus(
            ready=self.pipeline is not None,
            model="",
            epoch=scheduler.epoch,
            mtp=str(scheduler.controller.mode),
            running=len(running),
            running_limit=scheduler.capacity.sequences,
            waiting=len(scheduler.waiting),
            waiting_limit=scheduler.capacity.queue,
            kv_tokens=sum(s.capacity for s in running),
            kv_limit=scheduler.capacity.kv_tokens,
            tokens_per_second=frames.tokens_per_second(now),
            prompt_tokens_per_second=1 / pace if pace else None,
            drafted_by_position=tuple(frames.drafts.drafted),
            ngram_drafted=sum(frames.matched.drafted),
            ngram_accepted=sum(frames.matched.accepted),
            accepted_by_position=tuple(frames.drafts.accepted),
            prefilling=tuple(
                PrefillStatus(
                    s.request.request_id or str(s.seq_id),
                    s.computed_tokens,
                    s.prefill_tokens,
                    scheduler.prompts.expected_seconds(s.prefill_tokens - s.computed_tokens),
                )
                for s in running
                if s.computed_tokens < s.prefill_tokens
            ),
            recoveries=self.recoveries,
        )

    async def collect_trace(self, seconds: float) -> list[ProcessTrace]:
        """Return all processes' traces of the last `seconds` with frames. Raises NotReadyError or WorkerLostError."""
        if self.pipeline is None:
            raise NotReadyError("no plan is serving yet. Try again later")
        return await self.pipeline.collect_trace(int(seconds * 1e9))

    # ---- a planned change

    def hand_over(self, *, begin: bool) -> None:
        """Begin to back up all answers for the next plan, or end that."""
        self.scheduler.backups.hand_over(begin=begin)
        self._send_frames()

    def is_handed_over(self) -> bool:
        """Return whether the next plan computes nothing again, or the answers paused for long enough."""
        scheduler = self.scheduler
        return scheduler.backups.is_handed_over(scheduler.running.values(), self.clock())

    # ---- requests

    def submit(self, request: GenerationRequest, deliver: Deliver) -> Callable[[], None]:
        if self._task is None or self._task.done():
            cause = self._describe_wait() or "it is starting or shutting down"
            raise NotReadyError(f"this server is not serving: {cause}")
        sequence = self.scheduler.submit(request, self.clock())
        self._listeners[sequence.seq_id] = sequence, deliver
        log.debug("request queued", extra={"seq_id": sequence.seq_id, "id": request.request_id})
        self._send_frames()
        return partial(self._cancel_request, sequence.seq_id)

    def queue_position(self, request: GenerationRequest) -> int | None:
        scheduler = self.scheduler
        return scheduler.prompts.queue_position(scheduler.running, scheduler.waiting, request)

    def _cancel_request(self, seq_id: int) -> None:
        """Remove a sequence whose client has left. A finished sequence is removed already."""
        if self._listeners.pop(seq_id, None) is None:
            return
        if self.pipeline is not None and self.scheduler.can_skip(seq_id):
            self.pipeline.broadcast_cancel(seq_id)
        self.scheduler.cancel_sequence(seq_id)
        self._send_frames()

    # ---- the loop

    async def _serve(self) -> None:
        """Receive frames until the server ends, over one pipeline after another."""
        while True:
            failure: ClusterError | None = None
            try:
                if self.pipeline is None:
                    await self._acquire_pipeline()
                else:
                    self._process_frame(await self.pipeline.receive_frame())
            except ClusterError as error:
                failure = error
            except Exception as error:  # a bug here: the state of the running requests is unknown
                log.exception("the generation loop failed")
                self._fail_requests("the server failed on one of the requests it was serving")
                failure = ClusterError(f"{type(error).__name__}: {error}")
            try:
                if failure is not None and self.pipeline is not None:
                    await self._abandon_pipeline(self.pipeline, failure)
            except Exception:  # a bug there: the next pipeline may serve
                log.exception("a failed pipeline was not closed")

    def _process_frame(self, frame: Frame) -> None:
        """Apply the outcomes of a returned frame, send the frames that follow, and deliver events to clients."""
        now = self.clock()
        sent = self.scheduler.in_flight[0] if self.scheduler.in_flight else None
        outcome = self.scheduler.apply_outcomes(frame, now)
        assert self.pipeline is not None
        stamps = self.pipeline.stamps.find_frame(frame.epoch, frame.number)
        stamps = stamps or FrameStamps(COORDINATOR, CoordinatorStep)
        stamps.mark(CoordinatorStep.APPLIED)
        self._failures = 0
        # The stages come first: they idle until the next frame, and an event to a client costs as much as a hop.
        try:
            for rollback in outcome.rollbacks:
                self.pipeline.broadcast_rollback(rollback)
            if outcome.backup is not None:
                self._backups.read_soon(self.pipeline, outcome.backup, self._send_frames)
            self._send_frames()
            stamps.mark(CoordinatorStep.SENT_NEXT)
            self.frames.record_frame(
                frame,
                now if sent is None else sent.sent_at,
                now,
                speculative=sent is not None and sent.speculative,
                tokens=outcome.token_count,
                draft_results=outcome.draft_results,
                matched_results=outcome.matched_results,
            )
        finally:  # the scheduler has applied these outcomes and will not return them again
            self._deliver_events(outcome)
            stamps.mark(CoordinatorStep.DELIVERED)
        if not self.scheduler.in_flight and log.isEnabledFor(logging.DEBUG):
            self.scheduler.check()

    async def _abandon_pipeline(self, pipeline: Pipeline, error: ClusterError) -> None:
        """Close a failed pipeline. After MAX_FAILURES in a row, also end all requests, so that the next one works."""
        replaced = isinstance(error, StaleEpochError)  # by another plan, which is not a failure
        if replaced:
            log.info("plan replaced", extra={"epoch": pipeline.epoch})
        else:
            log.warning("pipeline failed", extra={"epoch": pipeline.epoch, "error": str(error)})
        self.pipeline = None
        await self._backups.close()
        if not replaced:
            self.recoveries += 1
            self.scheduler.backups.record_failure(self.clock())
            self._failures += not self._shorten_chunks(error)
        if self._failures >= MAX_FAILURES:
            self._fail_requests(f"{self._failures} plans in a row failed before they gave a token")
            self._failures = 0
        self.source.report_failure(pipeline, error)
        await pipeline.close()

    def _shorten_chunks(self, error: ClusterError) -> bool:
        """Halve the prompt chunks if a GPU gave up a long one. Return False for another cause, and for short chunks."""
        limits = self.scheduler.limits.with_shorter_chunks()
        if limits is None or not is_gpu_timeout(str(error)):
            return False
        self.scheduler.limits = limits
        log.warning("prompt chunks shortened", extra={"tokens": limits.longest_chunk})
        return True

    async def _acquire_pipeline(self) -> None:
        """Acquire the next pipeline. If none is available within the source's deadline, end all requests."""
        try:
            self._adopt_pipeline(await self.source.acquire())
        except ClusterError as error:
            log.error("no plan can serve", extra={"error": str(error)})
            self._fail_requests(error.public)
            await asyncio.sleep(RETRY_SECONDS)
        except Exception:  # a bug here: clients must not wait without end
            log.exception("acquiring a plan failed")
            self._fail_requests("the server failed while it looked for a plan")
            await asyncio.sleep(RETRY_SECONDS)

    def _adopt_pipeline(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.scheduler.backups.enabled = pipeline.makes_backups
        outcome = self.scheduler.reset(
            pipeline.stages,
            pipeline.epoch,
            pipeline.capacity,
            self.clock(),
            pipeline.frame_limits,
        )
        self._deliver_events(outcome)
        self._send_frames()

    def _send_frames(self) -> None:
        """Send all frames that the scheduler has now."""
        if self.pipeline is None:
            return
        self._backups.restore_states(self.pipeline, self._send_frames)
        while (frame := self.scheduler.next_frame(self.clock())) is not None:
            self.pipeline.send_frame(frame)

    def _deliver_events(self, outcome: FrameOutcome) -> None:
        for seq_id, event in outcome.events:
            if seq_id in self._listeners:
                self._listeners[seq_id][1](event)
                if isinstance(event, Finished):
                    self._listeners.pop(seq_id, None)

    def _fail_requests(self, message: str) -> None:
        """End every open request. Its sequence may have left the scheduler, so the loop goes by listeners."""
        now, listeners = self.clock(), list(self._listeners.values())
        self._listeners.clear()
        for sequence in [*self.scheduler.running.values(), *self.scheduler.waiting]:
            self.scheduler.cancel_sequence(sequence.seq_id)
        for sequence, deliver in listeners:
            deliver(Finished("error", sequence.stats(now), error=message))
