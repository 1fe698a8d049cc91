"""The meter that turns returned frames into step costs for the depth controller."""

from __future__ import annotations

from coordinator.generation.in_flight import FrameInFlight
from mtp.depth.estimates import StepCost
from proto.frame import Frame


class StepCostMeter:
    """Measurements of one plan with `stages` stages. Times are in seconds."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._hop_seconds = 0.0
        """Moving average of the time that a frame spends outside the stages."""

    def measure(
        self,
        frame: Frame,
        record: FrameInFlight,
        now: float,
        *,
        idle: bool,
        previous_returned_at: float | None,
    ) -> StepCost | None:
        """Return the cost of a returned micro-batch, or None if the frame does not show one.

        While there are fewer micro-batches than stages, a step takes a pass through all stages. In a full pipeline it
        takes the time of the slowest stage. `idle` says that no other frame is in flight. `previous_returned_at` is
        the time when the previous window of a speculative window's sequence returned.
        """
        seconds = sum(frame.stage_us) / 1e6
        if record.alone and idle and record.decode_rows:
            hops = now - record.sent_at - seconds
            self._hop_seconds += (hops - self._hop_seconds) / (4 if self._hop_seconds else 1)
        widths = {(s.width, s.drafts) for s in frame.segments}
        if not record.valid_windows or len(widths) > 1 or any(o.cancelled for o in frame.outcomes):
            return None
        interval = record.micro_batches * max(frame.stage_us) / 1e6
        full = record.micro_batches == self._stages > 1
        step = interval if full else seconds + self._hop_seconds
        if not record.speculative:
            return StepCost(step, interval)
        if previous_returned_at is None:
            return None
        return StepCost(step, now - previous_returned_at, speculative=True)
