"""Frames under way that do not move are told from a stage that computes, a hop that writes, and from nothing to do."""

from __future__ import annotations

from coordinator.pipeline.stall_detector import StallDetector


def heard(progress: StallDetector, *frames: int, now: float, busy_us: int = 0) -> None:
    """All stages tell how many frames they have run."""
    for stage, count in enumerate(frames):
        progress.record_stage(stage, count, busy_us, writing=False, now=now)


def test_nothing_under_way_is_never_still() -> None:
    """An idle cluster is well, however long."""
    progress = StallDetector(2)
    heard(progress, 0, 0, now=0.0)
    heard(progress, 0, 0, now=100.0)
    assert progress.stalled_seconds == 0.0
    progress.record_sent(100.0)
    progress.record_returned(100.5)
    heard(progress, 1, 1, now=200.0)
    assert progress.stalled_seconds == 0.0


def test_a_frame_that_one_side_sent_and_the_other_never_got() -> None:
    """Counted from the last thing that moved, by the word of every stage; where it is lost is known."""
    progress = StallDetector(3)
    heard(progress, 0, 0, 0, now=0.0)
    progress.record_sent(10.0)
    heard(progress, 1, 0, 0, now=11.0)
    assert progress.stalled_seconds == 0.0
    heard(progress, 1, 0, 0, now=13.0)
    assert progress.stalled_seconds == 2.0
    assert progress.losing_hop == 1
    progress.record_stage(0, 1, 0, writing=False, now=20.0)
    assert progress.stalled_seconds == 2.0  # the others have not said a word since


def test_what_moves() -> None:
    """A stage at work, a hop that is being written to, a frame that comes back: none of them is still."""
    progress = StallDetector(2)
    progress.record_sent(0.0)
    heard(progress, 1, 0, now=1.0)
    progress.record_stage(1, 0, 500, writing=False, now=5.0)
    assert progress.stalled_seconds == 0.0
    progress.record_stage(0, 1, 0, writing=True, now=9.0)
    progress.record_stage(1, 0, 500, writing=False, now=9.0)
    assert progress.stalled_seconds == 0.0
    progress.record_sent(9.5)
    progress.record_returned(10.0)
    heard(progress, 1, 1, now=10.5, busy_us=500)
    assert progress.stalled_seconds < 1.0


def test_lost_on_the_way_to_the_first_stage_and_back() -> None:
    """Either end of the pipeline can be where frames vanish."""
    progress = StallDetector(2)
    progress.record_sent(0.0)
    assert progress.losing_hop == 0
    heard(progress, 1, 1, now=1.0)
    assert progress.losing_hop == 2
