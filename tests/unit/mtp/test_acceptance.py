"""The number of tokens of a window that are accepted."""

from __future__ import annotations

from mtp.sampling.sampler import accepted_length


def test_accepted_length_counts_the_token_and_leading_correct_drafts() -> None:
    """The accepted length counts the confirmed token and the drafts before the first wrong one.

    Later drafts that agree with their target do not count.
    """
    assert accepted_length([7], [1]) == 1
    assert accepted_length([7, 1, 2, 3], [1, 2, 3, 4]) == 4
    assert accepted_length([7, 1, 2, 3], [1, 9, 3, 4]) == 2
    assert accepted_length([7, 5, 2, 3], [1, 2, 3, 4]) == 1


def test_a_misspeculated_window_accepts_nothing() -> None:
    """A window whose first token differs from the expected token has an accepted length of 0."""
    assert accepted_length([7, 1], [1, 2], expected=7) == 2
    assert accepted_length([7, 1], [1, 2], expected=8) == 0
