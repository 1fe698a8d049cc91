"""Benchmark of drafting for one stream on N stages: block by block, and with a filled pipeline, over plain decoding.

    python -m tests.bench.filled
    python -m tests.bench.filled --row 0.5 --draft 0.1

Stages sleep, in virtual time. The loop, the scheduler, the controller and the frames are real. A stage takes 10 ms for
one row. Each further row of a window adds `--row` of that, and each draft on the last stage adds `--draft` of it. The
defaults are those of a 4-bit 27B slice as MLX ran it once: 9.0, 13.5 and 22.0 ms for 1, 2 and 4 rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tests.bench.machine import about
from tests.bench.report import lines, publish
from tests.support.protocol.simulation import Timing, run_virtually, stream_seconds

MODES = ("1", "2", "3", "4", "filled", "auto")
TOKENS = 600


@dataclass(frozen=True)
class Found:
    """The result of one setting. `speedups` are, by mode, tokens per second over those of plain decoding."""

    stages: int
    chance: float
    speedups: dict[str, float]


def measure(timing: Timing, chance: float) -> Found:
    """Return the speedups on one timing."""
    seconds = {
        mode: run_virtually(stream_seconds(timing, mode, chance, TOKENS))
        for mode in ("off", *MODES)
    }
    return Found(timing.stages, chance, {mode: seconds["off"] / seconds[mode] for mode in MODES})


def table(found: Sequence[Found]) -> str:
    """Return a Markdown table."""
    head = ["stages", "a draft is right", *(f"--mtp {mode}" for mode in MODES)]
    rows = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for one in found:
        best = max(one.speedups[mode] for mode in MODES if mode != "auto")
        cells = [
            f"**{value:.2f}**" if value == best else f"{value:.2f}"
            for value in one.speedups.values()
        ]
        rows.append(f"| {one.stages} | {one.chance:.0%} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--chances", type=float, nargs="+", default=[0.3, 0.6, 0.75, 0.85, 0.95])
    parser.add_argument("--row", type=float, default=0.5)
    parser.add_argument("--draft", type=float, default=0.1)
    options = parser.parse_args()
    found = [
        measure(Timing(n, row=0.010 * options.row, draft=0.010 * options.draft), chance)
        for n in options.stages
        for chance in options.chances
    ]
    print(f"{about()}\nrow {options.row:g}, draft {options.draft:g}\n\n{table(found)}")
    publish(
        "filled",
        {"options": vars(options), "runs": [asdict(one) for one in found]},
        {
            f"a draft is right {chance:.0%} of the time": lines(
                options.stages,
                {mode: [f.speedups[mode] for f in found if f.chance == chance] for mode in MODES},
                "stages",
                "times plain decoding",
            )
            for chance in options.chances
        },
    )


class _Help(argparse.RawDescriptionHelpFormatter):
    """A formatter that keeps the lines of the examples."""


if __name__ == "__main__":
    main()
