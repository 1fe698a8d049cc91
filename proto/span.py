"""The span: the half-open range of layers `[start, end)` that one worker holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from proto.errors import SpanError


@dataclass(frozen=True, order=True)
class Span:
    """The layers from `start` to `end`, excluding `end`. A span is never empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.end <= self.start:
            raise SpanError(f"span {self.start}:{self.end} is empty or negative")

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __str__(self) -> str:
        """Return the span in `--layers` notation, in which both ends are included."""
        return f"{self.start}-{self.end - 1}"

    @classmethod
    def parse(cls, text: str) -> Span:
        """Parse `--layers` notation: `0-31` includes both ends, `7` is one layer. Raises SpanError."""
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
        if match is None:
            raise SpanError(f"--layers {text!r}: write first-last, as in 0-31 (both included)")
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        if last < first:
            raise SpanError(f"--layers {text!r}: the last layer is before the first")
        return cls(first, last + 1)

    def check_within(self, num_layers: int) -> None:
        """Raise SpanError unless every layer exists in a model of `num_layers`."""
        if self.end > num_layers:
            raise SpanError(f"--layers {self}: the model has {num_layers} layers, 0-{num_layers - 1}")


def spans_of(layers: Iterable[int]) -> Iterator[Span]:
    """Yield the spans that `layers` form together, in their order."""
    for _, run in groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0]):
        numbers = [layer for _, layer in run]
        yield Span(numbers[0], numbers[-1] + 1)
