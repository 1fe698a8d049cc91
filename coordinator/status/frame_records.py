"""The records of the newest frames, made when a frame returns: rates, acceptance, stage times and timeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from coordinator.drafts.averages import DraftCounts, DraftResult
from proto.frame import Frame

MAX_RECORDS = 4000
"""Records kept: 20 seconds at 200 frames a second."""

RATE_SECONDS = 10.0
"""Seconds. Period over which tokens per second are averaged."""

STEPS = 20
"""Decode steps over which the time of a stage is averaged."""

StageSpans = tuple[tuple[float, float], ...]
"""Start and end of each stage's work, in seconds on the loop's clock."""

FrameKind = Literal["prompt", "decode", "window", "speculative", "invalidated"]


@dataclass
class FrameRecord:
    """One returned frame. `number` counts all records since the start. Times are seconds on the loop's clock.

    `wasted` of its `rows` were rejected or invalidated. The lengths in `stages` are measured, their starts are the
    earliest that the order of frames allows. `mtp-coord trace` has exact ones.
    """

    number: int
    epoch: int
    kind: FrameKind
    rows: int
    wasted: int
    tokens: int
    sent_at: float
    returned_at: float
    stage_us: tuple[int, ...]
    stages: StageSpans


@dataclass(frozen=True)
class StageLoad:
    """The load of one stage of the plan.

    `step_ms` is the mean time of its last decode steps, None without one. `busy` is the fraction of the last
    RATE_SECONDS in which it computed, 0 to 1.
    """

    step_ms: float | None
    busy: float


@dataclass
class FrameRecords:
    """The last MAX_RECORDS records, oldest first, and the counts of drafts since the start."""

    records: deque[FrameRecord] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS))
    count: int = 0
    """Records since the start."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    matched: DraftCounts = field(default_factory=DraftCounts)
    """The counts of drafts from the text."""
    _busy_until: list[float] = field(default_factory=list)
    """The end of the last frame of each stage of the present plan, in seconds on the loop's clock."""

    def record_frame(
        self,
        frame: Frame,
        sent_at: float,
        now: float,
        *,
        speculative: bool = False,
        tokens: int = 0,
        draft_results: Iterable[DraftResult] = (),
        matched_results: Sequence[DraftResult] = (),
    ) -> None:
        """Record a returned frame. `speculative` says that its windows were sent on unverified ones."""
        self.drafts.record_drafts(draft_results)
        self.matched.record_drafts(matched_results)
        if not frame.segments:  # only operations, such as the end of a sequence
            return
        rows = sum(segment.width for segment in frame.segments)
        kept = sum(o.accepted_length for o in frame.outcomes if not o.cancelled)
        kind = _kind_of(frame, speculative=speculative)
        self.count += 1
        stages = self._place_stages(frame, sent_at)
        numbers = self.count, frame.epoch, kind, rows, rows - kept, tokens
        self.records.append(FrameRecord(*numbers, sent_at, now, frame.stage_us, stages))

    def _place_stages(self, frame: Frame, sent_at: float) -> StageSpans:
        """Return when each stage computed `frame`, at the earliest: after the stage and the frame before it."""
        if not self.records or self.records[-1].epoch != frame.epoch:
            self._busy_until = [sent_at] * len(frame.stage_us)
        spans, end = [], sent_at
        for stage, us in enumerate(frame.stage_us[: len(self._busy_until)]):
            start = max(end, self._busy_until[stage])
            end = self._busy_until[stage] = start + us / 1e6
            spans.append((start, end))
        return tuple(spans)

    # ---- figures

    def tokens_per_second(self, now: float) -> float:
        """Return the rate over the last RATE_SECONDS, or since the first token of that period."""
        tokens, first = 0, now
        for record in reversed(self.records):
            if record.returned_at < now - RATE_SECONDS:
                break
            if record.tokens:
                tokens, first = tokens + record.tokens, record.returned_at
        return tokens / max(now - first, 0.1)

    def stage_loads(self, epoch: int, now: float) -> tuple[StageLoad, ...]:
        """Return the loads of the stages of plan `epoch`, from the same frames; empty before its first frame."""
        steps: list[tuple[int, ...]] = []
        busy: list[float] = []
        for record in reversed(self.records):
            recent = record.returned_at > now - RATE_SECONDS
            if record.epoch != epoch or (len(steps) == STEPS and not recent):
                break
            within = min(record.returned_at, now) - max(record.sent_at, now - RATE_SECONDS)
            busy = busy or [0.0] * len(record.stage_us)
            for stage, us in enumerate(record.stage_us[: len(busy)]):
                busy[stage] += min(us / 1e6, max(within, 0.0))
            if len(steps) < STEPS and record.tokens and record.kind != "prompt":
                steps.append(record.stage_us)
        times = [round(sum(us) / len(steps) / 1000, 3) for us in zip(*steps, strict=False)]
        shares = [round(min(seconds / RATE_SECONDS, 1.0), 2) for seconds in busy]
        return tuple(StageLoad(times[i] if times else None, share) for i, share in enumerate(shares))

    def since(self, number: int, most: int = MAX_RECORDS) -> list[FrameRecord]:
        """Return the records after record `number`, at most the `most` newest."""
        missing = min(self.count - number, most, len(self.records))
        return [self.records[i] for i in range(len(self.records) - missing, len(self.records))]


def _kind_of(frame: Frame, *, speculative: bool) -> FrameKind:
    if all(outcome.cancelled for outcome in frame.outcomes):
        return "invalidated"
    if not all(segment.open for segment in frame.segments):
        return "prompt"
    if speculative:
        return "speculative"
    return "window" if any(segment.width > 1 for segment in frame.segments) else "decode"
