"""Tests that the detector tells lost frames from a computing stage, a writing hop and an idle pipeline."""

from __future__ import annotations

from coordinator.pipeline.remote_pipeline import StallDetector


def record_stages(progress: StallDetector, *frames: int, now: float, busy_us: int = 0) -> None:
    """Record a report of every stage with its number of frames."""
    for stage, count in enumerate(frames):
        progress.record_stage(stage, count, busy_us, writing=False, now=now)


def test_an_idle_pipeline_is_never_stalled() -> None:
    """An idle pipeline is never stalled."""
    progress = StallDetector(2)
    record_stages(progress, 0, 0, now=0.0)
    record_stages(progress, 0, 0, now=100.0)
    assert progress.stalled_seconds == 0.0
    progress.record_sent(100.0)
    progress.record_returned(100.5)
    record_stages(progress, 1, 1, now=200.0)
    assert progress.stalled_seconds == 0.0


def test_a_frame_that_one_side_sent_and_the_other_never_got() -> None:
    """The stall counts from the last movement, confirmed by every stage, and the losing hop is known."""
    progress = StallDetector(3)
    record_stages(progress, 0, 0, 0, now=0.0)
    progress.record_sent(10.0)
    record_stages(progress, 1, 0, 0, now=11.0)
    assert progress.stalled_seconds == 0.0
    record_stages(progress, 1, 0, 0, now=13.0)
    assert progress.stalled_seconds == 2.0
    assert progress.losing_hop == 1
    progress.record_stage(0, 1, 0, writing=False, now=20.0)
    assert progress.stalled_seconds == 2.0  # the other stages have not reported since


def test_movement_is_no_stall() -> None:
    """A computing stage, a hop that is being written and a returned frame count as movement."""
    progress = StallDetector(2)
    progress.record_sent(0.0)
    record_stages(progress, 1, 0, now=1.0)
    progress.record_stage(1, 0, 500, writing=False, now=5.0)
    assert progress.stalled_seconds == 0.0
    progress.record_stage(0, 1, 0, writing=True, now=9.0)
    progress.record_stage(1, 0, 500, writing=False, now=9.0)
    assert progress.stalled_seconds == 0.0
    progress.record_sent(9.5)
    progress.record_returned(10.0)
    record_stages(progress, 1, 1, now=10.5, busy_us=500)
    assert progress.stalled_seconds < 1.0


def test_relayed_tokens_that_are_lost() -> None:
    """A first stage that has the frame and awaits its tokens lost nothing. A later stage, or the last one, did."""
    progress = StallDetector(2)
    for _ in range(2):
        progress.record_sent(0.0)
    for frames, hop in ((1, 2), (0, 1)):  # of stage 1; stage 0 is done with the first frame of two
        progress.record_stage(1, frames, 0, writing=False, now=1.0)
        progress.record_stage(0, 1, 0, writing=False, now=1.0, awaits_tokens=True)
        assert progress.losing_hop == hop
        progress.record_stage(0, 1, 0, writing=False, now=1.0)
        assert progress.losing_hop == 0


def test_lost_on_the_way_to_the_first_stage_and_back() -> None:
    """Frames can be lost at either end of the pipeline."""
    progress = StallDetector(2)
    progress.record_sent(0.0)
    assert progress.losing_hop == 0
    record_stages(progress, 1, 1, now=1.0)
    assert progress.losing_hop == 2
