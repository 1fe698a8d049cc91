"""The recorded costs of steps, as data: seconds by rows, sequences, drafts and context, for one machine or two.

No figure of `Costs` is a trace. Each was derived from the speeds of `MEASURED` and its source, and
`tests/unit/coordinator/drafts/test_recorded_costs.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Costs:
    """The milliseconds of a step, derived from recorded speeds.

    A step takes `rows` (points of all its rows and their time), `sequence` for each sequence after the first, and
    `draft` for each draft of its longest chain, with `drawn` for each sequence after the first. `context` is added for
    each 1,000 tokens that a window reads, and `context_row` for each of its further rows. `host` passes between two
    steps unless frames overlap. A frame that continues none in flight takes `built` longer for each sequence after the
    first. A token of a prompt takes `token`. Each of `stages` takes its share, and the last one the drafts. Between two
    stages pass `hop`.
    """

    rows: tuple[tuple[int, float], ...]
    draft: float
    sequence: float = 0.0
    drawn: float = 0.0
    context: float = 0.0
    context_row: float = 0.0
    host: float = 1.0
    built: float = 0.0
    token: float = 0.3
    stages: int = 1
    hop: float = 0.6

    def milliseconds(self, windows: Sequence[tuple[int, int]], drafts: int, prompt: int, *, last: bool) -> float:
        """Return the time of a frame on a stage. `windows` are pairs of rows and context."""
        rows, others = sum(width for width, _ in windows), max(0, len(windows) - 1)
        read = sum(tokens * (self.context + self.context_row * (width - 1)) for width, tokens in windows) / 1000
        shared = at(max(1, rows), self.rows) + self.sequence * others + read + self.token * prompt
        return shared / self.stages + (drafts * (self.draft + self.drawn * others) if last else 0.0)


def at(rows: int, points: Sequence[tuple[int, float]]) -> float:
    """Return the value at `rows` between two of `points`, or beyond the last one with its slope."""
    for (low, first), (high, last) in pairwise(points):
        if rows <= high or high == points[-1][0]:
            return first + (last - first) * (rows - low) / (high - low)
    raise AssertionError(f"two points are needed: {points}")


def _linear(base: float, row: float) -> tuple[tuple[int, float], ...]:
    return (1, base + row), (2, base + 2 * row)


M4_PRO_ROWS = (
    (1, 66.2),
    (2, 79.5),
    (4, 106.0),
    (5, 108.0),
    (8, 108.0),
    (9, 182.0),
    (16, 182.0),
    (32, 199.0),
    (64, 365.0),
)
"""27B on an M4 Pro: 15.1 tokens/s and the curve of docs/models.md up to 16 rows. Prompts of 184 tokens/s above."""

M3_ULTRA_ROWS = ((1, 31.0), (2, 35.3), (4, 43.8), (5, 44.4), (8, 44.4), (9, 68.0), (16, 68.0), (32, 80.0), (64, 150.0))
"""The same for 819 GB/s, where launches take 10 of 31 ms."""

COSTS: dict[str, Costs] = {
    "27B, H200": Costs(_linear(11.2, 0.7), 0.25, drawn=0.25, context=0.03, context_row=0.014),
    "27B, two H200s": Costs(_linear(11.2, 0.7), 0.25, drawn=0.25, context=0.03, context_row=0.014, stages=2),
    "27B, group of two H200s": Costs(_linear(10.4, 0.75), 0.35, drawn=0.1, context=0.015, context_row=0.007),
    "wide, H100": Costs(_linear(10.6, 0.4), 1.4, context=0.03, context_row=0.01),
    "wide, two H100s": Costs(_linear(10.6, 0.4), 1.4, context=0.03, context_row=0.01, stages=2),
    "wide, group of two H100s": Costs(_linear(6.7, 0.37), 1.2, context=0.015, context_row=0.005),
    "35B-A3B, H200": Costs(((1, 8.85), (4, 10.4), (8, 16.2), (32, 32.0), (64, 50.0)), 0.3, drawn=0.02, context=0.02),
    "35B-A3B, two H200s": Costs(
        ((1, 8.85), (4, 10.4), (8, 16.2), (32, 32.0), (64, 50.0)), 0.3, drawn=0.02, context=0.02, stages=2
    ),
    "Flash-Next, H200": Costs(_linear(19.6, 1.1), 1.2, 3.2, 3.0, context=0.2, context_row=0.1),
    "Flash-Next, two H200s": Costs(_linear(19.6, 1.1), 1.2, 3.2, 3.0, context=0.2, context_row=0.1, stages=2),
    "GLM, H200": Costs(_linear(8.4, 0.6), 1.5, 0.77, 4.1, context=0.12, context_row=0.06),
    "GLM, two H200s": Costs(_linear(8.4, 0.6), 1.5, 0.77, 4.1, context=0.12, context_row=0.06, stages=2),
    "GLM, group of two H200s": Costs(_linear(8.4, 0.5), 1.6, 0.6, 4.1, context=0.06, context_row=0.03),
    "GLM that drafts on the device, H200": Costs(
        ((1, 9.3), (2, 10.8), (4, 13.0), (8, 15.8), (16, 23.0), (32, 30.0), (64, 44.0)), 0.5, drawn=1.6, built=1.3
    ),
    "27B, M4 Pro": Costs(M4_PRO_ROWS, 3.3, 0.6, 0.3, context=0.35, context_row=0.1, token=5.4),
    "27B, two M4 Pros": Costs(M4_PRO_ROWS, 3.3, 0.6, 0.3, context=0.35, context_row=0.1, token=5.4, stages=2),
    "27B, group of two M4 Pros": Costs(
        tuple((rows, 25.0 + 0.55 * time) for rows, time in M4_PRO_ROWS), 2.8, 0.4, 0.3, context=0.18, token=3.0
    ),
    "27B, M3 Ultra": Costs(M3_ULTRA_ROWS, 1.9, 0.6, 0.3, context=0.12, context_row=0.04, token=2.2),
}

MEASURED: dict[tuple[str, int], float] = {
    ("27B, H200", 1): 83.8,
    ("27B, H200", 8): 479,
    ("27B, two H200s", 1): 80,
    ("27B, two H200s", 8): 542,
    ("27B, two H200s", 16): 863,
    ("27B, group of two H200s", 1): 89,
    ("27B, group of two H200s", 8): 471,
    ("27B, group of two H200s", 16): 670,
    ("wide, H100", 1): 91,
    ("wide, H100", 8): 566,
    ("wide, H100", 16): 1019,
    ("wide, group of two H100s", 1): 140,
    ("wide, group of two H100s", 8): 878,
    ("wide, group of two H100s", 16): 1279,
    ("35B-A3B, H200", 1): 113,
    ("35B-A3B, H200", 8): 494,
    ("Flash-Next, H200", 1): 48.2,
    ("Flash-Next, H200", 8): 157,
    ("GLM, H200", 1): 111,
    ("GLM, H200", 8): 434,
    ("GLM that drafts on the device, H200", 1): 108,
    ("GLM that drafts on the device, H200", 8): 475,
    ("GLM that drafts on the device, H200", 16): 666,
}
"""Tokens per second of plain decoding by machine and streams (docs/measurements.md). All other costs are derived."""
