"""Sizes as users write and read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.errors import UsageError
from proto.terminal.size import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GB", 64 * 10**9), ("1.5 tb", 15 * 10**11), ("2GiB", 2**31), ("512B", 512), ("7kB", 7000)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    """Powers of 1,000, or of 1,024 with an i; case and one space do not matter."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "64XB", "1e9", "0", "0.1B", "9" * 400, "64", "1.5", "٣GB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    """A UsageError shows how to write one."""
    with pytest.raises(UsageError, match="size"):
        parse_size(text)


@given(st.integers(0, 2**60))
def test_sizes_are_shown_in_three_digits(count: int) -> None:
    """Short, never in scientific notation, and within half a percent of the truth."""
    text = format_size(count)
    assert re.fullmatch(r"\d+(\.\d+)? (B|kB|MB|GB|TB)", text) or count > 10**15
    if count >= 1 and "e" not in text:
        assert parse_size(text) == pytest.approx(count, rel=0.006)
