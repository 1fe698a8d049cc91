"""The expected time of a prompt is learned from chunks, and grows faster than its length."""

from __future__ import annotations

import pytest

from coordinator.generation.prefill_rate import PrefillRate
from proto.frame import Frame
from proto.segment import Segment

CHUNK = 512


def chunk(position: int, seconds: float, width: int = CHUNK, *, is_open: bool = False) -> Frame:
    """Return a frame with one chunk that two stages computed, the slower one in `seconds`."""
    segment = Segment(1, 0, position, tuple([1] * width), open=is_open)
    return Frame(1, 0, segments=(segment,), stage_us=(1000, int(seconds * 1e6)))


def seconds_of(position: int) -> float:
    """Return the time of a chunk that costs 2 ms a token, and 1 ms more for each thousand earlier tokens."""
    return CHUNK * (0.002 + 0.001 * (position + CHUNK / 2) / 1000)


def test_a_longer_prompt_is_predicted_from_a_shorter_one() -> None:
    """Ten chunks give the time of a prompt of 16k tokens within a tenth, which a constant rate would halve."""
    rate = PrefillRate()
    assert rate.expected_seconds(0, 1000) is None
    for position in range(0, 10 * CHUNK, CHUNK):
        rate.record_frame(chunk(position, seconds_of(position)))
    true = sum(seconds_of(position) for position in range(0, 16_384, CHUNK))
    assert rate.expected_seconds(0, 16_384) == pytest.approx(true, rel=0.1)
    rest = sum(seconds_of(position) for position in range(8192, 16_384, CHUNK))
    assert rate.expected_seconds(8192, 16_384) == pytest.approx(rest, rel=0.1)


def test_windows_and_short_chunks_do_not_count() -> None:
    """Decode windows and the ends of prompts are dominated by the overhead of a frame."""
    rate = PrefillRate()
    rate.record_frame(chunk(0, 1.0, width=4))
    rate.record_frame(chunk(0, 1.0, width=32, is_open=True))
    assert rate.expected_seconds(0, 1000) is None
