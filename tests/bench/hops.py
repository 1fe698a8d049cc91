"""Benchmark of the way between processes: one plain stream over two real workers, with the trace of every frame.

    python -m tests.bench.hops
    python -m tests.bench.hops --rounds 5 --trace build/bench/hops-trace.json

The gap is the time from token to token minus the stages' own times. The table below it shows the medians of all phases
and hops of the last round. `--trace` writes the trace of that round for https://ui.perfetto.dev.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.cli.client import call
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from tests.bench.machine import about, parser_of
from tests.bench.report import bars, publish
from tests.bench.servers import cluster
from tests.bench.streams import ask
from tests.bench.texts import held_out_prompts

SETTLE_SECONDS = 0.05
"""Seconds before the answer that a trace includes, so that no frame of it is missing."""


@dataclass(frozen=True)
class Round:
    """One answer: milliseconds from token to token, and of these in the stages."""

    token_ms: float
    stages_ms: float
    report: dict[str, Any]

    @property
    def gap_ms(self) -> float:
        """Milliseconds a token outside the stages."""
        return self.token_ms - self.stages_ms


def stage_ms(events: list[dict[str, Any]]) -> float:
    """Return the sum over the stages of the median milliseconds that a decode frame spends in the engine."""
    frames: dict[tuple[int, int], float] = {}
    inside = {"build", "compute", "read"}
    for event in events:
        if event["ph"] == "X" and event["name"] in inside and event["args"]["rows"] == 1:
            key = event["pid"], event["args"]["frame"]
            frames[key] = frames.get(key, 0.0) + event["dur"] / 1000
    stages = {pid for pid, _ in frames}
    return sum(
        statistics.median(ms for (pid, _), ms in frames.items() if pid == stage) for stage in stages
    )


def measure(rounds: int, tokens: int) -> list[Round]:
    """Return one result per round, after one round that warms everything up."""
    model = checkpoint_dir()
    prompts = held_out_prompts(Tokenizer.load(model), rounds)
    found = []
    with (
        tempfile.TemporaryDirectory() as name,
        cluster(Path(name), model, "plain", "--dtype", "float32") as server,
    ):
        for number, prompt in enumerate([prompts[0], *prompts]):
            answer = ask(server.url, server.model, prompt, tokens, ignore_eos=True)
            seconds = answer.times[-1] + SETTLE_SECONDS
            path = f"/trace?seconds={seconds:.3f}"
            report = json.loads(call("GET", server.url, path, None, max_bytes=2**28))
            token_ms = 1000 * (answer.times[-1] - answer.times[0]) / (answer.tokens - 1)
            if number:
                events = report["trace"]["traceEvents"]
                found.append(Round(token_ms, stage_ms(events), report))
    return found


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--trace", type=Path, help="file for the trace of the last round")
    options = parser.parse_args()
    found = measure(options.rounds, options.tokens)
    medians = {
        "token to token": statistics.median(one.token_ms for one in found),
        "in the stages": statistics.median(one.stages_ms for one in found),
        "gap": statistics.median(one.gap_ms for one in found),
    }
    print(about())
    print("\n".join(f"{name}: {value:.3f} ms" for name, value in medians.items()))
    print(f"gaps: {', '.join(f'{one.gap_ms:.3f}' for one in found)}\n")
    print(found[-1].report["table"])
    if options.trace is not None:
        options.trace.parent.mkdir(parents=True, exist_ok=True)
        options.trace.write_text(json.dumps(found[-1].report["trace"]))
    publish(
        "hops",
        {"options": {"rounds": options.rounds, "tokens": options.tokens}, "medians": medians},
        {"one plain stream, two workers": bars(medians, "ms")},
    )


if __name__ == "__main__":
    main()
