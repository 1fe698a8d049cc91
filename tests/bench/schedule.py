"""Benchmark of the schedule on N stages: stages sleep, links delay, and loop, scheduler and frames are real.

    python -m tests.bench.schedule
    python -m tests.bench.schedule --real --stages 4 8

Time is virtual by default. The figures are then those of the schedule, not of the machine. In real time they include
the work of the coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.bench.machine import about, parser_of
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
"""Targets: shares of the maximum of N stages, and steps."""

FULL_RATE, DOUBLE_RATE = 0.9, 1.8
"""Stricter targets for N and for 2N streams. Micro-batches of two rows cost what one row costs."""

Run = Callable[[Coroutine[Any, Any, float]], float]


@dataclass(frozen=True)
class Found:
    """The figures of one number of stages.

    `one` is the tokens per second of one stream. `full` and `streams` are the rates of N and of 2N streams over N times
    `one`. Two rows of a micro-batch cost what one costs, so `streams` can reach 2. `prefill` is the gain over one chunk
    after the other, relative to the bound N C / (C + N - 1). `gap` is the longest wait of a running stream, in steps.
    """

    stages: int
    one: float
    full: float
    streams: float
    prefill_time: float
    prefill: float
    gap: float

    @property
    def misses(self) -> bool:
        """One of the targets is missed."""
        return self.streams < STREAMS or self.prefill < PREFILL or self.gap > GAP

    @property
    def falls_short(self) -> bool:
        """One of the stricter targets is missed."""
        return self.full < FULL_RATE or self.streams < DOUBLE_RATE


def measure(timing: Timing, run: Run) -> Found:
    """Return the figures of one timing."""
    stages = timing.stages
    one = run(decode_rate(timing, 1))
    pipelined = run(prefill_seconds(timing, CHUNKS))
    bound = stages * CHUNKS / (CHUNKS + stages - 1)
    return Found(
        stages,
        one,
        full=run(decode_rate(timing, stages)) / (stages * one),
        streams=run(decode_rate(timing, 2 * stages)) / (stages * one),
        prefill_time=pipelined,
        prefill=CHUNKS * timing.step / pipelined / bound,
        gap=run(longest_gap(timing, CHUNKS)) / timing.step,
    )


def table(found: Sequence[Found]) -> str:
    """Return a Markdown table."""
    rows = [
        "| stages | one stream, tokens/s | N streams over N x one | 2N streams over N x one "
        "| 16 chunks, s | over the bound | longest gap, steps |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows += [
        f"| {f.stages} | {f.one:.1f} | {f.full:.3f} | {f.streams:.3f} | {f.prefill_time:.3f} "
        f"| {f.prefill:.3f} | {f.gap:.2f} |"
        for f in found
    ]
    return "\n".join(rows)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
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
    print(_verdict(f"stricter, {FULL_RATE} with N streams and {DOUBLE_RATE} with 2N", short))
    publish(
        "schedule-real" if options.real else "schedule",
        {"options": vars(options), "stages": [asdict(f) for f in found]},
        {
            "over what N stages make of one": lines(
                options.stages,
                {
                    "N streams": [f.full for f in found],
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


if __name__ == "__main__":
    main()
