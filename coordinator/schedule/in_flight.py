"""Frames and verify windows in flight, and the cost of a step, which their return shows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import median

from coordinator.drafts.averages import DraftResult, Shape, StepCost
from proto.control import Rollback
from proto.frame import Frame


@dataclass(eq=False)
class FrameInFlight:
    """A frame that has not returned: when it was sent, and which work it carries."""

    number: int
    sent_at: float
    """Seconds, in the clock of the scheduler's caller."""
    alone: bool
    """No other frame was in flight when this one was sent."""
    decode_rows: int = 0
    """Windows in the frame; 0 for prompt chunks."""
    micro_batches: int = 1
    """Micro-batches in flight at most, when the frame was sent."""
    fill: int = 1
    """Windows in flight per sequence at most, when the frame was sent."""
    valid_windows: int = 0
    """Windows in the frame that no outcome has invalidated."""
    follows: int | None = None
    """The number of the frame whose windows this one continues, if it had not returned when this one was sent."""
    speculative: bool = False
    """The frame carries a window that was sent before the previous window of its sequence returned."""
    shape: Shape = field(default_factory=Shape)
    """The shape of its first window."""

    @property
    def continues(self) -> bool:
        """True if the windows of this frame continue those of a frame that was in flight."""
        return self.follows is not None


@dataclass(frozen=True)
class Window:
    """A verify window in flight.

    `first` is the position of its first token in the chain of drafts: 0 for the confirmed token, i for the i-th
    draft. A window with `first` > 0 is speculative: it builds on the unverified windows before it. A window that
    `continues` has one token, which is unknown until the window before it returns. `drafts` are requested after it. The
    last stage relays the token after a window that `relays` to the first stage. The tokens of a `matched` window come
    from the text.
    """

    number: int
    first: int
    tokens: tuple[int, ...]
    frame: FrameInFlight = field(compare=False, repr=False)
    """The frame that carries the window."""
    drafts: int = 0
    continues: bool = False
    relays: bool = False
    matched: bool = False

    @property
    def width(self) -> int:
        """Number of tokens."""
        return len(self.tokens) + self.continues


class WindowResult(Enum):
    """The result of a returned window for the windows that build on it."""

    ACCEPTED = auto()
    """All tokens are accepted, and the next window in flight, if any, begins with the target's token."""
    MISSPECULATED = auto()
    """All tokens are accepted, and the windows in flight continue with another token or after the end of the text."""
    REJECTED = auto()
    """A draft of the window is rejected."""


@dataclass(frozen=True)
class WindowOutcome:
    """The consequences of a returned window.

    `tokens` are final. `invalidated` are the windows in flight that build on a rejected token. `rollback` is None if
    no token leaves the end of the sequence. The drafts of a `matched` window come from the text.
    """

    tokens: tuple[int, ...]
    invalidated: tuple[Window, ...]
    rollback: Rollback | None
    draft_results: tuple[DraftResult, ...]
    matched: bool = False

    @property
    def accepted(self) -> int:
        """Number of accepted drafts."""
        return sum(result.accepted for result in self.draft_results)


@dataclass(frozen=True)
class LastWindow:
    """The last returned window of a sequence, or before the first window its last chunk.

    It returned at `returned_at`, in seconds of the clock of the scheduler's caller. `frame` is the number of the frame
    that carried the window, None before the first window in this plan.
    """

    returned_at: float = 0.0
    frame: int | None = None


OVERHEAD_STEPS = 7
"""Steps. The time between and around the stages is the median of this many, so that one long frame does not count."""


class StepTimer:
    """The measured costs of the decode steps of one plan with `stages` stages. Times are in seconds.

    The cost of a step is the time from token to token. The timer splits it into the stages' own times, which depend on
    the shape, and an overhead, which does not: hops, queues and the coordinator. The stages' times come with each
    frame. The overhead is the median of the newest frames that show it.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._pass_overheads: deque[float] = deque(maxlen=OVERHEAD_STEPS)
        """Overheads of the newest passes through an empty pipeline."""
        self._cycle_overheads: deque[float] = deque(maxlen=OVERHEAD_STEPS)
        """Overheads of the newest cycles of a full pipeline, in which each micro-batch returns once."""

    def measure_step(
        self,
        frame: Frame,
        record: FrameInFlight,
        now: float,
        before: LastWindow,
        *,
        idle: bool,
    ) -> StepCost | None:
        """Return the cost of a returned micro-batch, or None if the frame does not show one.

        `before` is the last window of the sequence of the frame's first segment. `idle` says that no other frame is in
        flight. While there are fewer micro-batches than stages, a step takes a pass through all stages. In a full
        pipeline it takes a cycle, which the slowest stage determines.
        """
        if not record.decode_rows:
            return None
        modelled_pass = sum(frame.stage_us) / 1e6
        modelled_cycle = record.micro_batches * max(frame.stage_us) / 1e6
        full = record.micro_batches == self._stages > 1
        empty = idle and not full
        self._record_overheads(record, now, before, modelled_pass, modelled_cycle, empty)
        if not record.valid_windows or any(o.cancelled for o in frame.outcomes):
            return None
        stages = tuple(us / 1e6 for us in frame.stage_us)
        interval = now - before.returned_at
        if record.continues:
            if before.frame != record.follows:
                return None  # a new sequence waited for that frame, too
            return StepCost(interval, stages=stages, ahead=True)
        if full:
            return StepCost(modelled_cycle + median(self._cycle_overheads or [0.0]), stages=stages)
        seconds = modelled_pass + median(self._pass_overheads or [0.0])
        return StepCost(seconds, interval if record.speculative else 0.0, stages)

    def _record_overheads(
        self,
        record: FrameInFlight,
        now: float,
        before: LastWindow,
        modelled_pass: float,
        modelled_cycle: float,
        empty: bool,
    ) -> None:
        # The first window of a run in a filled pipeline meets only windows that the stages skip.
        first = record.fill > 1 and not record.alone and not record.speculative
        if (empty and record.alone) or (first and not record.continues):
            # A prompt chunk after the window before is no part of a step's cost.
            next_to = not first and before.frame == record.number - 1
            since = before.returned_at if next_to else record.sent_at
            self._pass_overheads.append(max(0.0, now - since - modelled_pass))
        # Prompt chunks between the micro-batches make a cycle longer, and are no part of a step's cost.
        last = before.frame
        cycled = last is not None and record.number - last == record.micro_batches
        if record.micro_batches == self._stages > 1 and cycled:
            cycle = now - before.returned_at
            self._cycle_overheads.append(max(0.0, cycle - modelled_cycle))
