"""The path that a client probably meant when it sent an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

PREFIXES = ("v1", "api", "openai")
"""First segments that clients omit, repeat or add, depending on their base URL."""

SIMILARITY = 0.8
"""The minimum similarity of a misspelled path, 0 to 1: one wrong letter in a short path, two in a long one."""


def nearest_path(path: str, known: Iterable[str]) -> str | None:
    """Return the path of `known` that `path` most likely means, or None.

    Paths with equal segments after their prefixes are nearest, then paths with a similar spelling.
    """
    stems: dict[str, str] = {}
    for candidate in known:
        stems.setdefault(_stem(candidate), candidate)
    stem = _stem(path)
    if not stem:
        return None
    if stem in stems:
        return stems[stem]
    close = difflib.get_close_matches(stem, stems, n=1, cutoff=SIMILARITY)
    return stems[close[0]] if close else None


def _stem(path: str) -> str:
    """Return the segments of `path` in lower case, without prefixes and empty segments."""
    segments = [segment.lower() for segment in path.split("/") if segment]
    while segments and segments[0] in PREFIXES:
        segments.pop(0)
    return "/".join(segments)
