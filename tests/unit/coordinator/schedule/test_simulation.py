"""Tests of the schedule alone, in virtual time: N stages with many streams and with a long prompt."""

from __future__ import annotations

import pytest

from tests.support.protocol.simulation import (
    Timing,
    decode_rate,
    longest_gap,
    prefill_seconds,
    run_virtually,
    stream_seconds,
)

STAGES = (2, 4, 8, 16)


@pytest.mark.parametrize("stages", STAGES)
def test_many_streams_fill_the_pipeline(stages: int) -> None:
    """N streams on N stages yield at least .9 N times the tokens per second of one stream, and 2N streams 1.8 N times.

    Two rows of a micro-batch cost what one costs.
    """
    timing = Timing(stages)
    one, full, many = (run_virtually(decode_rate(timing, streams)) for streams in (1, stages, 2 * stages))
    assert full >= 0.9 * stages * one
    assert many >= 1.8 * stages * one


@pytest.mark.parametrize("stages", STAGES)
def test_chunks_of_a_prompt_follow_each_other(stages: int) -> None:
    """16 chunks through N stages take at most 1/.9 of the bound (C + N - 1)/(N C) of their time one by one."""
    timing, chunks = Timing(stages), 16
    pipelined = run_virtually(prefill_seconds(timing, chunks))
    one_by_one = chunks * timing.step
    assert one_by_one / pipelined >= 0.9 * stages * chunks / (chunks + stages - 1)


@pytest.mark.parametrize(("stages", "streams"), [(2, 1), (2, 2), (2, 4), (4, 1), (4, 8), (4, 11)])
def test_plain_tokens_do_not_wait_for_the_coordinator(stages: int, streams: int) -> None:
    """From token to token pass N stages and N hops, the relay included, however slow the coordinator is.

    In full pipelines frames of other micro-batches do not delay a token either.
    """
    timing = Timing(stages, apply=0.005)
    seconds = streams / run_virtually(decode_rate(timing, streams, 80))
    assert seconds < 1.01 * stages * (timing.stage + timing.hop)


@pytest.mark.parametrize("stages", STAGES)
def test_a_long_prompt_does_not_stall_an_open_stream(stages: int) -> None:
    """While a 16-chunk prompt is prefilled, no token of a running stream takes more than two steps."""
    timing = Timing(stages)
    assert run_virtually(longest_gap(timing, 16)) <= 2 * timing.step


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_one_stream_fills_the_pipeline(stages: int) -> None:
    """A filled pipeline is well ahead of any block of drafts if a second row costs half a pass more.

    `auto` finds this out within a thousand tokens. The others find nothing out, so a part of the text has their rate.
    """
    timing = Timing(stages, row=0.005, draft=0.001)
    tokens = dict.fromkeys(("off", "1", "2", "3", "filled"), 250) | {"auto": 1000}
    seconds = {mode: run_virtually(stream_seconds(timing, mode, 0.85, count)) / count for mode, count in tokens.items()}
    best = min(seconds[mode] for mode in ("off", "1", "2", "3"))
    assert best / seconds["filled"] > {2: 1.15, 4: 1.6, 8: 2.0}[stages]
    assert seconds["auto"] < 1.07 * seconds["filled"]


def test_filling_costs_nothing_where_drafts_are_worthless() -> None:
    """With one right draft in a hundred, `auto` is as fast as plain decoding, except for the exploration."""
    timing = Timing(4, row=0.005, draft=0.001)
    off, auto = (run_virtually(stream_seconds(timing, mode, 0.01, 400)) for mode in ("off", "auto"))
    assert auto < 1.05 * off


def test_filled_chooses_wide_windows_where_rows_are_cheap() -> None:
    """At the costs of two GPUs with a slow host, `filled` is 1.9 times as fast as plain decoding in one process.

    A stage of half the model takes 60 % of the whole, a further row 5 % and a draft 4 %. Single tokens reach 1.3.
    """
    whole = 0.020
    timing = Timing(2, 0.6 * whole, 0.025 * whole, row=0.03 * whole, draft=0.04 * whole)
    seconds = run_virtually(stream_seconds(timing, "filled", 0.82, 400))
    assert 399 * whole / seconds > 1.9
