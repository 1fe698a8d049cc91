"""The last frames of the pipeline with the times of each stage, for a timeline.

A frame carries how long each stage computed, not when. `FrameHistory` estimates the places of these times between the
moments when the coordinator sent the frame and received it: a stage handles one frame at a time, in order, and a hop
takes as long as in the fastest frame so far. The trace of the stages replaces the estimates by the exact times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

MAX_FRAMES = 4000
"""Frames kept: 20 seconds at 200 frames a second."""

HOP_GROWTH = 1.01
"""Factor. The hop estimate grows by it with each frame, so that it follows a network that became slower."""

FrameKey = tuple[int, int]
"""The epoch and the number of a frame."""

StageSpans = tuple[tuple[float, float], ...]
"""Start and end of each stage's work, in seconds on the loop's clock."""

FrameKind = Literal["prompt", "decode", "window", "speculative", "invalidated"]

MAX_SEQUENCES = 256
"""Sequences whose last return is kept. More than run at once, so only ended ones are dropped."""


@dataclass(frozen=True)
class FrameTimes:
    """One returned frame. `number` counts all frames since the start. Times are seconds on the loop's clock.

    `wasted` of its `rows` were rejected or invalidated. `stages` has the start and the end of each stage's work.
    They are estimates unless `exact`.
    """

    number: int
    kind: FrameKind
    rows: int
    wasted: int
    sent_at: float
    returned_at: float
    stages: StageSpans
    key: FrameKey = (0, 0)
    exact: bool = False


class FrameHistory:
    """The last MAX_FRAMES frames, oldest first."""

    def __init__(self) -> None:
        self.frames: deque[FrameTimes] = deque(maxlen=MAX_FRAMES)
        self.count = 0
        """Frames since the start."""
        self._free_at: list[float] = []
        """Seconds. End of the previous frame on each stage."""
        self._hop: float | None = None
        self._returned_at: dict[int, float] = {}
        """Seconds. Return of the last frame of each sequence, the most recent last."""

    def record_sequences(
        self, sequences: Collection[int], sent_at: float, returned_at: float
    ) -> set[int]:
        """Record the sequences of a returned frame, and return those with an earlier frame in flight at `sent_at`."""
        overlapping = {s for s in sequences if self._returned_at.pop(s, sent_at) > sent_at}
        self._returned_at |= dict.fromkeys(sequences, returned_at)
        while len(self._returned_at) > MAX_SEQUENCES:
            del self._returned_at[next(iter(self._returned_at))]
        return overlapping

    def record_frame(
        self,
        kind: FrameKind,
        rows: int,
        wasted: int,
        stage_us: Sequence[int],
        sent_at: float,
        returned_at: float,
        key: FrameKey = (0, 0),
    ) -> None:
        """Add a returned frame."""
        self.count += 1
        stages = self._place_stages(stage_us, sent_at, returned_at)
        self.frames.append(
            FrameTimes(self.count, kind, rows, wasted, sent_at, returned_at, stages, key)
        )

    def place_frame(self, number: int, stages: StageSpans) -> None:
        """Replace the estimated times of frame `number` by exact ones, if the frame is still kept."""
        if self.frames and (index := number - self.frames[0].number) >= 0:
            self.frames[index] = replace(self.frames[index], stages=stages, exact=True)

    def estimated_since(self, number: int) -> list[FrameTimes]:
        """Return the frames after frame `number` whose times are estimates."""
        return [frame for frame in self.since(number, MAX_FRAMES) if not frame.exact]

    def since(self, number: int, most: int) -> list[FrameTimes]:
        """Return the frames after frame `number`, at most the `most` newest."""
        missing = min(self.count - number, most, len(self.frames))
        return [self.frames[i] for i in range(len(self.frames) - missing, len(self.frames))]

    def _place_stages(
        self, stage_us: Sequence[int], sent_at: float, returned_at: float
    ) -> tuple[tuple[float, float], ...]:
        if len(self._free_at) != len(stage_us):  # another plan
            self._free_at = [sent_at] * len(stage_us)
            self._hop = None
        outside = max(0.0, returned_at - sent_at - sum(stage_us) / 1e6)
        hop = outside / (len(stage_us) + 1)
        self._hop = hop if self._hop is None else min(hop, self._hop * HOP_GROWTH)
        spans, arrived = [], sent_at + self._hop
        for microseconds, free_at in zip(stage_us, self._free_at, strict=True):
            start = max(arrived, free_at)
            spans.append((start, start + microseconds / 1e6))
            arrived = spans[-1][1] + self._hop
        late = max(0.0, spans[-1][1] - returned_at) if spans else 0.0
        placed = tuple((start - late, end - late) for start, end in spans)
        self._free_at = [end for _, end in placed]
        return placed
