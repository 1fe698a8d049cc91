"""The cost of decode steps, measured from returned frames, for the controller of the draft depth."""

from __future__ import annotations

from coordinator.drafts.averages import StepCost
from coordinator.schedule.sequence import FrameInFlight, Sequence
from proto.frame import Frame

OVERHEAD_STEPS = 4
"""Steps. Time constant of the averages of the time between and around the stages."""


class StepCostMeter:
    """Measurements of one plan with `stages` stages. Times are in seconds.

    The cost of a step is the time from token to token. The meter splits it into the stages' own times, which depend on
    the shape, and an overhead, which does not: hops, queues and the coordinator. The stages' times come with each
    frame. The overhead is averaged over the frames that show it.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._pass_overhead: float | None = None  # of a pass through an empty pipeline
        self._cycle_overhead: float | None = None
        """Overhead of a cycle of a full pipeline, in which each micro-batch returns once."""

    def measure(
        self,
        frame: Frame,
        record: FrameInFlight,
        now: float,
        sequence: Sequence | None,
        *,
        idle: bool,
    ) -> StepCost | None:
        """Return the cost of a returned micro-batch, or None if the frame does not show one.

        `sequence` is the sequence of the frame's first segment, if it still runs. `idle` says that no other frame is in
        flight. While there are fewer micro-batches than stages, a step takes a pass through all stages. In a full
        pipeline it takes a cycle, which the slowest stage determines.
        """
        if sequence is None or not record.decode_rows:
            return None
        modelled_pass = sum(frame.stage_us) / 1e6
        modelled_cycle = record.micro_batches * max(frame.stage_us) / 1e6
        full = record.micro_batches == self._stages > 1
        empty = idle and not full
        self._record_overheads(record, now, sequence, modelled_pass, modelled_cycle, empty)
        if not record.valid_windows or any(o.cancelled for o in frame.outcomes):
            return None
        stages = tuple(us / 1e6 for us in frame.stage_us)
        interval = now - sequence.window_returned_at
        if record.continues:
            return StepCost(interval, stages=stages)
        if full:
            return StepCost(modelled_cycle + (self._cycle_overhead or 0.0), stages=stages)
        seconds = modelled_pass + (self._pass_overhead or 0.0)
        return StepCost(seconds, interval if record.speculative else 0.0, stages)

    def _record_overheads(
        self,
        record: FrameInFlight,
        now: float,
        sequence: Sequence,
        modelled_pass: float,
        modelled_cycle: float,
        empty: bool,
    ) -> None:
        # The first window of a run in a filled pipeline meets only windows that the stages skip.
        first = record.fill > 1 and not record.alone and not record.speculative
        if (empty and record.alone) or (first and not record.continues):
            since = (not first and sequence.window_returned_at) or record.sent_at
            self._pass_overhead = _average(self._pass_overhead, now - since - modelled_pass)
        # Prompt chunks between the micro-batches make a cycle longer, and are no part of a step's cost.
        last = sequence.window_frame
        cycled = last is not None and record.number - last == record.micro_batches
        if record.micro_batches == self._stages > 1 and cycled:
            cycle = now - sequence.window_returned_at
            self._cycle_overhead = _average(self._cycle_overhead, cycle - modelled_cycle)


def _average(before: float | None, sample: float) -> float:
    """Return the moving average of overheads, which are never negative."""
    sample = max(0.0, sample)
    return sample if before is None else before + (sample - before) / OVERHEAD_STEPS
