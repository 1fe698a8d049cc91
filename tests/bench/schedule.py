"""What the schedule makes of N stages: they sleep, links delay, and the loop, the scheduler and the frames are real.

    python -m tests.bench.schedule
    python -m tests.bench.schedule --real --stages 4 8

Time is virtual unless asked otherwise: the figures are then the schedule's own, whatever else the machine does. In
real time the coordinator's work is in them too.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.bench.machine import about
from tests.bench.report import lines, publish
from tests.support.protocol.simulation import (
    Timing,
    decode_rate,
    longest_gap,
    prefill_seconds,
    run_virtually,
)

CHUNKS = 16
STREAMS, PREFILL, GAP = 0.9, 0.9, 2.0
"""Targets: shares of what N stages could do at most, and steps."""

LANES, FULL = 0.9, 1.8
"""Stricter than the first of them: of N streams and of 2N, whose lanes of two rows cost what one row costs."""

Run = Callable[[Coroutine[Any, Any, float]], float]


@dataclass(frozen=True)
class Found:
    """Of one number of stages. `one`: tokens a second of one stream; `lanes`, `streams`: those of N and of 2N streams
    over N times that (two rows of a lane cost what one costs, so twice that can be had). `prefill`: how many times as
    fast as one chunk after the other, over the bound N C / (C + N - 1). `gap`: an open stream's longest wait, in steps.
    """

    stages: int
    one: float
    lanes: float
    streams: float
    convoy_seconds: float
    prefill: float
    gap: float

    @property
    def misses(self) -> bool:
        return self.streams < STREAMS or self.prefill < PREFILL or self.gap > GAP

    @property
    def falls_short(self) -> bool:
        """Of the stricter mark."""
        return self.lanes < LANES or self.streams < FULL


def measure(timing: Timing, run: Run) -> Found:
    stages = timing.stages
    one = run(decode_rate(timing, 1))
    convoy = run(prefill_seconds(timing, CHUNKS))
    bound = stages * CHUNKS / (CHUNKS + stages - 1)
    return Found(
        stages,
        one,
        lanes=run(decode_rate(timing, stages)) / (stages * one),
        streams=run(decode_rate(timing, 2 * stages)) / (stages * one),
        convoy_seconds=convoy,
        prefill=CHUNKS * timing.step / convoy / bound,
        gap=run(longest_gap(timing, CHUNKS)) / timing.step,
    )


def table(found: Sequence[Found]) -> str:
    rows = [
        "| stages | one stream, tokens/s | N streams over N x one | 2N streams over N x one "
        "| 16 chunks, s | over the bound | longest gap, steps |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows += [
        f"| {f.stages} | {f.one:.1f} | {f.lanes:.3f} | {f.streams:.3f} | {f.convoy_seconds:.3f} "
        f"| {f.prefill:.3f} | {f.gap:.2f} |"
        for f in found
    ]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4, 6, 8, 12, 16])
    parser.add_argument("--stage-ms", type=float, default=10.0)
    parser.add_argument("--hop-ms", type=float, default=1.0)
    parser.add_argument("--real", action="store_true", help="let the seconds pass")
    options = parser.parse_args()
    run: Run = asyncio.run if options.real else run_virtually
    print(f"{about()}; {'real' if options.real else 'virtual'} time\n", flush=True)
    found = [
        measure(Timing(stages, options.stage_ms / 1e3, options.hop_ms / 1e3), run)
        for stages in options.stages
    ]
    print(table(found))
    print(_verdict(f"targets {STREAMS}, {PREFILL}, {GAP:g}", [f.stages for f in found if f.misses]))
    short = [f.stages for f in found if f.falls_short]
    print(_verdict(f"stricter, {LANES} with N streams and {FULL} with 2N", short))
    publish(
        "schedule-real" if options.real else "schedule",
        {"options": vars(options), "stages": [asdict(f) for f in found]},
        {
            "over what N stages make of one": lines(
                options.stages,
                {
                    "N streams": [f.lanes for f in found],
                    "2N streams": [f.streams for f in found],
                    "16 chunks": [f.prefill for f in found],
                },
                "stages",
                "ratio",
            ),
            "longest gap while a prompt goes in": lines(
                options.stages, {"gap": [f.gap for f in found]}, "stages", "steps"
            ),
        },
    )


def _verdict(what: str, missed: list[int]) -> str:
    return f"{what}: " + (f"missed at {missed}" if missed else "reached")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the examples' lines."""


if __name__ == "__main__":
    main()
