"""The schedule alone, in virtual time: what N stages make of many streams and of a long prompt."""

from __future__ import annotations

import pytest

from tests.simulation import Timing, decode_rate, longest_gap, prefill_seconds, run_virtually

STAGES = (2, 4, 8, 16)


@pytest.mark.parametrize("stages", STAGES)
def test_many_streams_fill_the_pipeline(stages: int) -> None:
    """2N streams over N stages yield at least .9 N times the tokens a second of one stream."""
    timing = Timing(stages)
    one = run_virtually(decode_rate(timing, 1))
    many = run_virtually(decode_rate(timing, 2 * stages))
    assert many >= 0.9 * stages * one


@pytest.mark.parametrize("stages", STAGES)
def test_chunks_of_a_prompt_follow_each_other(stages: int) -> None:
    """16 chunks through N stages take at most 1/.9 of the bound (C + N - 1)/(N C) of their time one by one."""
    timing, chunks = Timing(stages), 16
    convoy = run_virtually(prefill_seconds(timing, chunks))
    one_by_one = chunks * timing.step
    assert one_by_one / convoy >= 0.9 * stages * chunks / (chunks + stages - 1)


@pytest.mark.parametrize("stages", STAGES)
def test_a_long_prompt_does_not_stall_an_open_stream(stages: int) -> None:
    """While a 16-chunk prompt goes in, no token of an open stream takes more than two steps."""
    timing = Timing(stages)
    assert run_virtually(longest_gap(timing, 16)) <= 2 * timing.step
