"""The detector for frames that do not move, and for the place where they are lost. Plain data; callers pass times."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StageProgress:
    """The last report of a stage: its frames in this plan, and its counter of busy microseconds."""

    frames: int = 0
    busy_us: int = 0
    reported_at: float = 0.0
    """Seconds, in the caller's clock."""
    awaits_tokens: bool = False
    """A frame waits there for tokens that the last stage relays, so no hop lost it."""


@dataclass
class StallDetector:
    """The progress of the frames of one plan over `stages` stages.

    Other code watches a stage that computes and a hop that is being written. Both count as movement here. The detector
    finds the remaining case: a hop loses a frame although no stream breaks and every worker is alive.
    """

    stages: int
    sent: int = 0
    returned: int = 0
    moved_at: float = 0.0
    _stages: list[StageProgress] = field(init=False)

    def __post_init__(self) -> None:
        self._stages = [StageProgress() for _ in range(self.stages)]

    def record_sent(self, now: float) -> None:
        """Record a frame sent to stage 0."""
        if self.sent == self.returned:
            self.moved_at = now
        self.sent += 1

    def record_returned(self, now: float) -> None:
        """Record a frame returned by the last stage."""
        self.returned += 1
        self.moved_at = now

    def record_stage(
        self,
        stage: int,
        frames: int,
        busy_us: int,
        *,
        writing: bool,
        now: float,
        awaits_tokens: bool = False,
    ) -> None:
        """Record a stage's report. `writing` says that the stage is writing a frame to the next one."""
        before = self._stages[stage]
        if writing or (frames, busy_us) != (before.frames, before.busy_us):
            self.moved_at = now
        self._stages[stage] = StageProgress(frames, busy_us, now, awaits_tokens)

    @property
    def stalled_seconds(self) -> float:
        """Seconds without movement while frames are in flight, confirmed by a report of every stage."""
        if self.sent == self.returned:
            return 0.0
        return max(0.0, min(stage.reported_at for stage in self._stages) - self.moved_at)

    @property
    def losing_hop(self) -> int:
        """The hop that lost a frame: the first stage with fewer frames than the stage before it.

        It is `stages` for the hops from the last stage: to the coordinator, and to a first stage that awaits tokens.
        """
        before = self.sent
        for number, stage in enumerate(self._stages):
            if stage.frames < before and not stage.awaits_tokens:
                return number
            before = stage.frames
        return self.stages
