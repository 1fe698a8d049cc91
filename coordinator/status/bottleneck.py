"""The shares of time that the stages and the hops of a pipeline took, as measured, and what would make it faster."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_FRAMES = 400
"""Frames that the shares cover: about ten seconds of one fast stream."""

FEWEST_FRAMES = 20
"""Frames below which no advice is given: the first ones compile and warm up."""

SLOW_HOP = 0.25
"""Share of a pass. A hop that takes more is named first: it costs more than a bad cut."""

BUSY = 0.8
"""Share of time. A stage that computes more than this leaves little to gain by filling gaps."""

UNBALANCED = 1.15
"""Ratio. A stage whose time exceeds the mean by this factor is named as the slowest: less is noise."""


ADVICE_SECONDS = 3.0
"""Seconds between two computations of the advice: it takes a millisecond, and a sentence that changes faster is hard to
read."""


@dataclass(frozen=True)
class MeasuredPass:
    """One frame's way, in seconds: when it was sent and returned, and the start and end of each stage's work."""

    sent_at: float
    returned_at: float
    stages: tuple[tuple[float, float], ...]

    def hop_seconds(self) -> list[float]:
        """Return the times between the stages, with those of the coordinator's own two hops at the ends.

        A time includes the wait of the frame at a busy stage.
        """
        moments = [self.sent_at, *(moment for stage in self.stages for moment in stage)]
        moments.append(self.returned_at)
        return [max(0.0, b - a) for a, b in zip(moments[::2], moments[1::2], strict=True)]


class PassLog:
    """The last WINDOW_FRAMES measured passes of one plan."""

    def __init__(self) -> None:
        self._passes: deque[MeasuredPass] = deque(maxlen=WINDOW_FRAMES)
        self._advice = ""
        self._advised: tuple[str, ...] = ()
        """The names of the stages in `_advice`."""
        self._advised_at = 0.0
        """Seconds. End of the newest pass that `_advice` covers."""

    def record_pass(self, one: MeasuredPass) -> None:
        """Add a pass. One over another number of stages belongs to a new plan and drops the earlier ones."""
        if self._passes and len(self._passes[0].stages) != len(one.stages):
            self._passes.clear()
            self._advised = ()
        self._passes.append(one)

    def explain(self, names: Sequence[str]) -> str:
        """Return one sentence on what would help most, for stages called `names`; empty with too few passes.

        The sentence follows new passes after ADVICE_SECONDS.
        """
        if len(self._passes) < FEWEST_FRAMES or len(names) != len(self._passes[0].stages):
            return ""
        newest = self._passes[-1].returned_at
        if tuple(names) != self._advised or newest - self._advised_at >= ADVICE_SECONDS:
            self._advised, self._advised_at = tuple(names), newest
            self._advice = self._compute_advice(names)
        return self._advice

    def _compute_advice(self, names: Sequence[str]) -> str:
        active = self._active_seconds()
        busy = [
            sum(end - start for start, end in column) / active
            for column in zip(*(one.stages for one in self._passes), strict=True)
        ]
        if sentence := self._explain_hops(names, max(busy)):
            return sentence
        return _explain_stages(names, busy)

    def _active_seconds(self) -> float:
        """Return the time in which at least one frame was in flight."""
        total, until = 0.0, 0.0
        for one in sorted(self._passes, key=lambda one: one.sent_at):
            total += max(0.0, one.returned_at - max(until, one.sent_at))
            until = max(until, one.returned_at)
        return max(total, 1e-9)

    def _explain_hops(self, names: Sequence[str], busiest: float) -> str:
        """Return a sentence if a link between two machines takes much of each pass and no stage is busy."""
        flight = sum(one.returned_at - one.sent_at for one in self._passes)
        columns = list(zip(*(one.hop_seconds() for one in self._passes), strict=True))
        between = [sum(column) / flight for column in columns[1:-1]]
        if not between or busiest > BUSY or max(between) < SLOW_HOP:
            return ""
        place = between.index(max(between))
        return (
            f"{names[place]} to {names[place + 1]} takes {between[place]:.0%} of each pass: "
            "a faster link there would help most."
        )


def _explain_stages(names: Sequence[str], busy: Sequence[float]) -> str:
    share = max(busy)
    name = names[busy.index(share)]
    if share < BUSY:
        return (
            f"Machines wait for each other: {name}, the busiest, computes {share:.0%} of the time. "
            "More answers at once would fill the gaps."
        )
    ratio = share * len(busy) / sum(busy)
    if len(busy) > 1 and ratio >= UNBALANCED:
        return (
            f"{name} computes {share:.0%} of the time, {ratio:.1f} times the mean. "
            "Fewer layers there, or a faster machine, would help."
        )
    return f"{name} computes {share:.0%} of the time: only faster machines or more accepted drafts would help."
