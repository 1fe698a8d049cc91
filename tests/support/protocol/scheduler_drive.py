"""A driver of a scheduler and a fake last stage, one call at a time: no threads, no tensors, the test's own clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.drafts.prompt_lookup import NgramMode
from coordinator.planning.capacity import Capacity
from coordinator.schedule.admission import Limits
from coordinator.schedule.backups import BackupInFlight
from coordinator.schedule.request import Finished, GenerationEvent, GenerationRequest, TokenChunk
from coordinator.schedule.scheduler import FrameOutcome, Scheduler
from proto.control import Rollback
from proto.frame import Frame, Segment
from proto.params import SamplingParams
from tests.support.stages.token_stages import FakeLastStage

LIMITS = Limits(context=1000, prefill_chunk=4, step_tokens=8)
ROOM = Capacity(sequences=16, kv_tokens=10_000, prefix_bytes=0)


class Drive:
    """A scheduler and its last stage. Each call also runs `Scheduler.check`."""

    def __init__(
        self,
        stages: int = 1,
        depth: int = 0,
        limits: Limits = LIMITS,
        room: Capacity = ROOM,
        stage: FakeLastStage | None = None,
        *,
        mtp: str | None = None,
        ngram: NgramMode = NgramMode.off,
    ) -> None:
        mode = MtpMode(depth) if mtp is None else MtpMode.parse(mtp)
        self.scheduler = Scheduler(limits, Controller(mode, ngram=ngram))
        self.now = 0.0
        self.frame_seconds = 1.0
        """Seconds from one returned frame to the next."""
        self.backup_seconds = 0.0
        """Seconds that the transfer of a backup takes."""
        self.events: dict[int, list[GenerationEvent]] = defaultdict(list)
        self.rollbacks: list[Rollback] = []
        self.new_plan(stage or FakeLastStage(), stages, room)

    def new_plan(self, stage: FakeLastStage, stages: int = 1, room: Capacity = ROOM) -> None:
        """Start a new plan, whose stage has the backups. The frames in flight are lost."""
        self.stage = stage
        self.record_outcome(self.scheduler.reset(stages, stage.epoch, room, self.now))
        for sequence in list(self.scheduler.waiting)[: room.sequences]:
            backup = self.scheduler.backups.kept.get(sequence.seq_id)
            if backup is not None and sequence.may_restore:
                stage.receive_backup(sequence.seq_id, backup.states)
                sequence.await_backup(backup.tokens)
        self.scheduler.check()

    def record_outcome(self, outcome: FrameOutcome) -> None:
        """Record the events and rollbacks of an outcome."""
        self.rollbacks += outcome.rollbacks
        for seq_id, event in outcome.events:
            self.events[seq_id].append(event)

    def submit(
        self,
        prompt: Sequence[int] = (1, 2, 3),
        tokens: int = 20,
        seed: int = 0,
        stop: Sequence[int] = (),
        logprobs: int | None = None,
        client: str = "",
        drafts: int | None = None,
    ) -> int:
        """Submit a request and return its sequence number."""
        params = SamplingParams(seed=seed, logprobs=logprobs)
        request = GenerationRequest(tuple(prompt), tokens, params, frozenset(stop), client=client, drafts=drafts)
        return self.scheduler.submit(request, self.now).seq_id

    def send(self) -> Frame | None:
        """Send the next frame and return it, or None."""
        frame = self.scheduler.next_frame(self.now)
        self.scheduler.check()
        if frame is not None:
            self.stage.send(frame)
        return frame

    def fill(self) -> list[Frame]:
        """Send all frames that the scheduler has now."""
        frames = []
        while (frame := self.send()) is not None:
            frames.append(frame)
        return frames

    def back(self) -> Frame:
        """Return the oldest frame to the scheduler, `frame_seconds` later."""
        self.now += self.frame_seconds
        frame = self.stage.come_back()
        outcome = self.scheduler.apply_outcomes(frame, self.now)
        if outcome.backup is not None:
            self._read_backup(outcome.backup)
        self.record_outcome(outcome)
        self.scheduler.check()
        return frame

    def _read_backup(self, made: BackupInFlight) -> None:
        """Read the backup that a returned frame has made, in `backup_seconds`."""
        read = self.stage.take_backup(made.seq_id)
        assert read is not None
        backups = self.scheduler.backups
        backups.complete_backup(made, read.length, read.states)
        backups.end_backup(made, self.backup_seconds, self.now)

    def run_frames(self, count: int) -> None:
        """Return `count` frames, each after all frames that the scheduler has are sent."""
        for _ in range(count):
            self.fill()
            self.back()

    def run(self) -> None:
        """Run until no frame is left to send or to return."""
        self.fill()
        while self.stage.in_flight:
            self.back()
            self.fill()

    def tokens(self, seq_id: int) -> list[int]:
        """Return the tokens that a client received."""
        chunks = [e for e in self.events[seq_id] if isinstance(e, TokenChunk)]
        return [token for chunk in chunks for token in chunk.tokens]

    def finished(self, seq_id: int) -> Finished:
        """Return the last event of a client, and assert that it is the only Finished."""
        events = self.events[seq_id]
        assert sum(isinstance(e, Finished) for e in events) == 1
        last = events[-1]
        assert isinstance(last, Finished)
        return last


def is_decode(frame: Frame) -> bool:
    """Return whether a frame carries windows only."""
    return bool(frame.segments) and all(s.open for s in frame.segments)


def chunks_of(frames: Sequence[Frame]) -> list[Segment]:
    """Return the prompt chunks of `frames`."""
    return [s for frame in frames for s in frame.segments if not s.open]
