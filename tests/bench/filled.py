"""Benchmark of drafting for one stream on N stages: blocks, filled pipelines and `auto`, over plain decoding.

    python -m tests.bench.filled
    python -m tests.bench.filled --row 0.05 --draft 0.05
    python -m tests.bench.filled --stages 2 --stage-ms 5.9 --row 0.01 --draft 0.1 --hop-ms 0.3 --one-ms 12.1

Stages sleep, in virtual time. The loop, the scheduler, the controller and the frames are real. A stage takes
`--stage-ms` for one row. Each further row of a window adds `--row` of that, and each draft on the last stage adds
`--draft` of it. The defaults are those of a 4-bit 27B slice as MLX ran it once: 9.0, 13.5 and 22.0 ms for 1, 2 and 4
rows. The best fixed choice is found by running each depth, and each width and fill of a filled pipeline. `auto` and
`filled` begin without knowledge. With `--one-ms` speeds are over plain decoding in one process instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from coordinator.depth.controller import AUTO_DEPTH, Controller, MtpMode, shapes_to_compare
from coordinator.depth.step_costs import Shape
from tests.bench.machine import about, parser_of
from tests.bench.report import lines, publish
from tests.support.protocol.simulation import Simulation, Timing, run_virtually, stream_seconds
from tests.support.stages.fake_last_stage import LuckyLastStage

MODES = ("1", "3", "filled", "auto")


class FixedShape(Controller):
    """A controller that always chooses one shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(MtpMode(depth=shape.depth))
        self.shape = shape

    def choose_shape(self, sequences: int = 1, fill: int = 1, tokens: int = 0) -> Shape:
        """Return the fixed shape."""
        return self.shape


async def fixed_seconds(timing: Timing, shape: Shape, chance: float, tokens: int) -> float:
    """Return the time from the first token to the last of one stream with windows of `shape`."""
    async with Simulation(timing, last=LuckyLastStage(chance)) as simulation:
        simulation.scheduler.controller = FixedShape(shape)
        times = await simulation.stream(7, tokens)
    return times[-1] - times[0]


@dataclass(frozen=True)
class Found:
    """The result of one setting. `speedups` are tokens per second over the base, by mode.

    `best` is the fastest fixed shape, `fastest` its speedup, and `best_filled` the fastest filled pipeline.
    """

    stages: int
    chance: float
    speedups: dict[str, float]
    best: str
    fastest: float
    best_filled: str
    filled: float

    @property
    def share(self) -> float:
        """Speed of `auto` over the best fixed shape."""
        return self.speedups["auto"] / self.fastest


def measure(timing: Timing, chance: float, tokens: int, one: float | None = None) -> Found:
    """Return the speedups on one timing over plain decoding there, or over `one` second per token."""
    shapes = shapes_to_compare(timing.stages, AUTO_DEPTH)
    fixed = {s: run_virtually(fixed_seconds(timing, s, chance, tokens)) for s in shapes}
    base = fixed[Shape(1)] if one is None else one * (tokens - 1)
    best = min(shapes, key=lambda s: fixed[s])
    filled = min([s for s in shapes if s.fill > 1] or [Shape(1)], key=lambda s: fixed[s])
    speedups = {
        mode: base / run_virtually(stream_seconds(timing, mode, chance, tokens))
        for mode in ("off", *MODES)
    }
    return Found(
        timing.stages,
        chance,
        speedups,
        _name(best),
        base / fixed[best],
        _name(filled),
        base / fixed[filled],
    )


def _name(shape: Shape) -> str:
    return f"{shape.width} x {shape.fill}" if shape.fill > 1 else f"--mtp {shape.depth}"


def table(found: Sequence[Found]) -> str:
    """Return a Markdown table."""
    head = ["stages", "a draft is right", *(f"--mtp {mode}" for mode in ("off", *MODES))]
    head += ["best fixed", "auto over it", "best filled"]
    rows = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for one in found:
        cells = [f"{value:.2f}" for value in one.speedups.values()]
        cells += [f"{one.fastest:.2f} ({one.best})", f"{one.share:.3f}"]
        cells += [f"{one.filled:.2f} ({one.best_filled})"]
        rows.append(f"| {one.stages} | {one.chance:.0%} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--chances", type=float, nargs="+", default=[0.3, 0.6, 0.75, 0.85, 0.95])
    parser.add_argument("--stage-ms", type=float, default=10.0)
    parser.add_argument("--hop-ms", type=float, default=1.0)
    parser.add_argument("--row", type=float, default=0.5)
    parser.add_argument("--draft", type=float, default=0.1)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--one-ms", type=float, help="a token of plain decoding in one process")
    options = parser.parse_args()
    stage, one = options.stage_ms / 1e3, options.one_ms and options.one_ms / 1e3
    found = []
    for n in options.stages:
        timing = Timing(
            n, stage, options.hop_ms / 1e3, row=stage * options.row, draft=stage * options.draft
        )
        found += [measure(timing, chance, options.tokens, one) for chance in options.chances]
    print(f"{about()}\n{options}\n\n{table(found)}")
    print(f"\nauto over the best fixed choice: at least {min(one.share for one in found):.3f}")
    publish(
        "filled",
        {"options": vars(options), "runs": [asdict(one) for one in found]},
        {
            f"a draft is right {chance:.0%} of the time": lines(
                options.stages,
                {mode: [f.speedups[mode] for f in found if f.chance == chance] for mode in MODES},
                "stages",
                "times the base",
            )
            for chance in options.chances
        },
    )


if __name__ == "__main__":
    main()
