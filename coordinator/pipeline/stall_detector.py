"""Whether the frames under way move on, and if not, where they are lost. Plain data; the caller has the clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Stage:
    """What a stage last said: frames it has run in this plan, and its counter of microseconds at work."""

    frames: int = 0
    busy_us: int = 0
    at: float = 0.0
    """When it said so."""


@dataclass
class Progress:
    """The frames of one plan over `stages` stages.

    A stage that computes, however long, and a hop that is being written to are watched elsewhere, and count as moving
    here. What is left is a frame that one side has sent and the other never gets: no stream breaks, everyone is
    well, and nothing happens any more.
    """

    stages: int
    sent: int = 0
    returned: int = 0
    moved_at: float = 0.0
    _stages: list[Stage] = field(init=False)

    def __post_init__(self) -> None:
        self._stages = [Stage() for _ in range(self.stages)]

    def send(self, now: float) -> None:
        """A frame went to stage 0."""
        if self.sent == self.returned:
            self.moved_at = now
        self.sent += 1

    def take(self, now: float) -> None:
        """A frame came back from the last stage."""
        self.returned += 1
        self.moved_at = now

    def hear(self, stage: int, frames: int, busy_us: int, *, writing: bool, now: float) -> None:
        """A stage told where it stands. `writing`: a frame of its is on its way to the next."""
        before = self._stages[stage]
        if writing or (frames, busy_us) != (before.frames, before.busy_us):
            self.moved_at = now
        self._stages[stage] = Stage(frames, busy_us, now)

    @property
    def still(self) -> float:
        """Seconds for which frames are under way and, by the word of every stage, nothing has moved."""
        if self.sent == self.returned:
            return 0.0
        return max(0.0, min(stage.at for stage in self._stages) - self.moved_at)

    @property
    def lost_before(self) -> int:
        """The first stage that has not got all frames the one before it has run; `stages` for the way back."""
        given = self.sent
        for number, stage in enumerate(self._stages):
            if stage.frames < given:
                return number
            given = stage.frames
        return self.stages
