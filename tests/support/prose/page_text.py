"""The prose of a Markdown page: paragraphs and list items without code, with the rows of tables apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_FENCE = re.compile(r"^\s*(```|~~~)")
_ITEM = re.compile(r"^\s*([*-]|\d+\.) ")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Block:
    """A paragraph, a list item or a row of a table, and the line it begins on."""

    line: int
    is_row: bool
    content: str


def read_blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of `page`; headings, fenced and indented code are left out, links are their text."""
    lines: list[str] = []
    start = 0
    fenced = False
    for number, line in enumerate([*page.split("\n"), ""], start=1):
        is_fence = _FENCE.match(line) is not None
        outside = not fenced and not is_fence
        fenced ^= is_fence
        is_row = outside and line.startswith("|")
        is_code = line.startswith("    ") and not lines
        is_break = not outside or not line.strip() or line.startswith("#") or is_row or is_code
        if lines and (is_break or _ITEM.match(line)):
            yield Block(start, False, _LINK.sub(r"\1", "\n".join(lines)))
            lines = []
        if is_row:
            yield Block(number, True, _LINK.sub(r"\1", line))
        elif not is_break:
            start = start if lines else number
            lines.append(line)
