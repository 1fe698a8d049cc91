"""Matches of a text with itself, and when their drafts pay."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.drafts.averages import DraftResult, Shape, StepCost
from coordinator.drafts.controller import Controller, MtpMode, shapes_of_matches
from coordinator.drafts.prompt_lookup import (
    GRAM,
    LONGEST_MATCH,
    MOST_DRAFTS,
    MOST_NEW,
    MatchResults,
    NgramMatcher,
    NgramMode,
)

TEXT = st.lists(st.integers(0, 2), max_size=40)


def longest(text: Sequence[int]) -> int:
    """Return the length of the longest match at the end of `text`, by trying every place."""
    found = 0
    for place in range(1, len(text)):
        length = 0
        while length < min(place, LONGEST_MATCH) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        found = max(found, length)
    return found if found >= GRAM else 0


@given(TEXT)
def test_a_new_text_has_a_longest_match(text: list[int]) -> None:
    """The match is as long as the best of the newest places, and its drafts are what followed it."""
    matcher = NgramMatcher()
    matcher.follow(text)
    if matcher.match is None:
        assert not longest(text)
        return
    length, follower = matcher.match.length, matcher.match.follower
    assert GRAM <= length <= longest(text)
    assert text[follower - length : follower] == text[len(text) - length :]
    assert matcher.drafts[: len(text) - follower] == tuple(text[follower:][:MOST_DRAFTS])


@given(TEXT, TEXT)
def test_a_match_goes_on_while_its_drafts_are_right(text: list[int], more: list[int]) -> None:
    """A text that grows token by token has valid matches at each of them, and results for each draft."""
    matcher, whole = NgramMatcher(), list(text)
    matcher.follow(whole)
    for token in more:
        expected = matcher.drafts[:1]
        whole.append(token)
        found = matcher.follow(whole)
        assert (found is None) == (not expected)
        if found is not None:
            assert found.results == (DraftResult(1, expected == (token,)),)
        if matcher.match is not None:
            length, follower = matcher.match.length, matcher.match.follower
            assert whole[follower - length : follower] == whole[len(whole) - length :]
            assert len(matcher.drafts) == MOST_DRAFTS


def test_drafts_beyond_the_end_repeat() -> None:
    """A text that repeats itself with a short period has a whole window of drafts."""
    matcher = NgramMatcher()
    matcher.follow([1, 2, 3] * 3)
    assert matcher.drafts == (1, 2, 3) * 5


def test_a_long_text_is_indexed_in_pieces() -> None:
    """One call adds at most MOST_NEW places, so that no stream waits for a long prompt of another."""
    drawn = random.Random(1)
    text = [drawn.randrange(10**6) for _ in range(2 * MOST_NEW + 100)]
    text += text[MOST_NEW + 500 : MOST_NEW + 520]
    matcher = NgramMatcher()
    matcher.follow(text)
    assert matcher.match is None
    matcher.follow(text)
    assert matcher.match is not None and matcher.match.follower == MOST_NEW + 520


def test_results_count_up_to_the_first_wrong_draft() -> None:
    """Drafts after a wrong one have no result."""
    matcher = NgramMatcher()
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]
    matcher.follow(text)
    found = matcher.follow([*text, 5, 9, 7])
    assert found == MatchResults(GRAM, (DraftResult(1, True), DraftResult(2, False)))


# ---- when a match pays


def controller_with(row: float, right: int, of: int = 20, streams: int = 1) -> Controller:
    """Return a controller that has seen plain steps, steps whose rows cost `row` each, and results of matches."""
    controller = Controller(MtpMode(0), ngram=NgramMode.auto)
    matcher = repeating()
    assert matcher.match is not None
    for number in range(of):
        results = (DraftResult(1, number < right), DraftResult(2, True), DraftResult(3, True))
        controller.record_match(MatchResults(matcher.match.length, results))
    for _ in range(60):
        shapes = [one or Shape() for one in controller.matched_shapes([matcher] * streams)]
        rows = sum(shape.width for shape in shapes)
        cost = StepCost(1.0 + row * (rows - streams))
        controller.record_step_cost(streams, 1, rows, 0, shapes[0], cost)
    return controller


def repeating() -> NgramMatcher:
    """Return a matcher with a short match."""
    matcher = NgramMatcher()
    matcher.follow([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4])
    return matcher


def test_a_good_match_has_the_widest_window_where_rows_are_cheap() -> None:
    """Sixteen rows for little more than the price of one."""
    (shape,) = controller_with(row=0.01, right=20).matched_shapes([repeating()])
    assert shape == Shape(16, matched=True) and shape.depth == 0


@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize(("row", "right"), [(1.0, 20), (0.3, 2)], ids=["dear rows", "wrong matches"])
def test_a_match_that_does_not_pay_has_no_window(row: float, right: int, streams: int) -> None:
    """Rows that cost as much as steps, or matches that are seldom right."""
    controller = controller_with(row, right, streams=streams)
    assert controller.matched_shapes([repeating()] * streams) == [None] * streams


def test_one_match_among_many_sequences_pays_by_its_own_rows() -> None:
    """Seven sequences without a match do not make a match dearer, nor does the price of eight matches at once."""
    controller = controller_with(row=0.02, right=20, streams=8)
    found = controller.matched_shapes([None] * 7 + [repeating()])
    assert found == [None] * 7 + [Shape(8, matched=True)]


def test_a_width_out_of_use_is_tried_again() -> None:
    """Steps that were slow when a width was first used do not rule it out for ever."""
    controller = controller_with(row=3.0, right=20)
    tried = 0
    for _ in range(600):
        (shape,) = controller.matched_shapes([repeating()])
        width = shape.width if shape else 1
        tried += width > 1
        cost = StepCost(1.0 + 0.01 * (width - 1))
        controller.record_step_cost(1, 1, width, 0, shape or Shape(), cost)
    assert tried > 0 and controller.matched_shapes([repeating()]) != [None]


def test_windows_are_narrower_for_more_sequences_and_fit_a_filled_pipeline() -> None:
    """All sequences of a step may have a match at once, and a chain has at most 16 tokens in flight."""
    assert max(shape.width for shape in shapes_of_matches(1, 1)) == 16
    assert max(shape.width for shape in shapes_of_matches(16, 1)) == 4
    filled = [shape for shape in shapes_of_matches(1, 4) if shape.fill > 1]
    assert filled and all(shape.width * shape.fill <= 16 and not shape.depth for shape in filled)


def test_off_searches_no_text() -> None:
    """Without n-grams there is no matcher."""
    assert Controller(MtpMode(0)).new_matcher() is None
