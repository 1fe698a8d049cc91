"""Benchmark of one stream over two real workers, each on its own core: the built-in model, plain, drafting and filled.

    python -m tests.bench.one_stream

All clusters run the whole time. Each answers in turn, in an order that rotates. The ratios within a round are compared.
The figure is tokens per second from the first to the last piece of an answer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from tests.bench.machine import about
from tests.bench.report import bars, publish
from tests.bench.servers import cluster
from tests.bench.streams import ask
from tests.bench.texts import held_out_prompts

MODES = ("off", "1", "2", "filled", "auto")


def measure(rounds: int, tokens: int) -> dict[str, list[float]]:
    """Return tokens per second by mode, one value per round, after one round that warms everything up."""
    model = checkpoint_dir()
    prompts = held_out_prompts(Tokenizer.load(model), rounds)
    found: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        servers = {
            mode: stack.enter_context(
                cluster(Path(name), model, f"mtp-{mode}", "--dtype", "float32", mtp=mode)
            )
            for mode in MODES
        }
        for number, prompt in enumerate([prompts[0], *prompts]):
            first = number % len(MODES)
            for mode in (*MODES[first:], *MODES[:first]):
                server = servers[mode]
                answer = ask(server.url, server.model, prompt, tokens, ignore_eos=True)
                seconds = answer.times[-1] - answer.times[0]
                found[mode] += [(answer.tokens - 1) / seconds] if number else []
    return found


def table(found: dict[str, list[float]]) -> str:
    """Return a Markdown table."""
    lines = ["| --mtp | tokens/s | over off |", "| --- | --- | --- |"]
    for mode, speeds in found.items():
        ratio = statistics.median(a / b for a, b in zip(speeds, found["off"], strict=True))
        lines.append(f"| {mode} | {statistics.median(speeds):.1f} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    found = measure(options.rounds, options.tokens)
    print(f"{about()}\n{options}\n\n{table(found)}")
    medians = {mode: statistics.median(speeds) for mode, speeds in found.items()}
    publish("one_stream", found, {"one stream, two workers": bars(medians, "tokens/s")})


class _Help(argparse.RawDescriptionHelpFormatter):
    """A formatter that keeps the lines of the example."""


if __name__ == "__main__":
    main()
