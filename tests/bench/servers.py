"""Two pinned workers against stock mlx-lm on the same checkpoint, with the same requests over HTTP.

    python -m tests.bench.servers

Every server runs the whole time and is measured in turn, in a rotating order, so that other load affects all equally.
The result is the ratio within a round. MTP is off. The weights are random, which does not change the cost of a token.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from coordinator.text.tokenizer import Tokenizer
from tests.bench import stock
from tests.bench.machine import about, parser_of
from tests.bench.random_model import prompt_of, write_random_model
from tests.bench.report import bars, publish
from tests.bench.streams import ask, throughput
from tests.support.processes.processes import as_worker, ending, launch_worker, serving

CORES = (0, 1)
PORTS = range(18300, 18330)
"""Ports of mlx-lm's servers, which cannot choose their own."""

LONG, SHORT = 1000, 16
"""Tokens of a long prompt."""

STREAMS = 8

OURS, UNCACHED = "two workers", "two workers, no prefix cache"
ONE, LAUNCHED, RANKS = "mlx-lm", "mlx-lm pipeline", "mlx-lm pipeline, no launcher"

TARGETS = {
    "first token": {ONE: 1.5, LAUNCHED: 2.0},
    "8 streams": {ONE: 1.5, LAUNCHED: 2.0},
    "one stream": {ONE: 0.9, LAUNCHED: 2.0},
}
"""Required speed of two workers, as a multiple of stock mlx-lm's."""

Rounds = dict[str, dict[str, list[float]]]
"""For each figure and server one value a round: seconds, tokens a second, tokens a second, as in TARGETS."""


@dataclass(frozen=True)
class Server:
    """A server: its URL, its name for the model, and a context that wakes it."""

    url: str
    model: str
    awake: Callable[[], AbstractContextManager[object]] = nullcontext


@contextmanager
def cluster(
    folder: Path, model: Path, name: str, *flags: str, mtp: str = "off"
) -> Iterator[Server]:
    """Run two workers, each pinned to a core, and a coordinator that may use either core."""
    with ExitStack() as stack:
        launched = [
            stack.enter_context(ending(launch_worker(folder, f"{name}-{core}", cores=[core])))
            for core in CORES
        ]
        addresses = [as_worker(process).address for process in launched]
        serve = serving(folder, model, addresses, "--mtp", mtp, "--nodes", "2", *flags, name=name)
        yield Server(stack.enter_context(serve).url, model.name)


@contextmanager
def stock_servers(folder: Path, model: Path) -> Iterator[dict[str, Server]]:
    """Run mlx-lm in one process and in two. They are stopped while other servers are measured."""
    with ExitStack() as stack:
        started = {
            ONE: stock.one_process(folder, model, PORTS[0], CORES[1]),
            LAUNCHED: stock.launched_pipeline(folder, model, PORTS[10], CORES),
            RANKS: stock.pipeline(folder, model, PORTS[20], CORES),
        }
        servers = {name: stack.enter_context(server) for name, server in started.items()}
        yield {name: Server(s.url, stock.MODEL, s.awake) for name, s in servers.items()}


class Prompts:
    """Prompts that no server has seen before."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._seed = 0

    def fresh(self, tokens: int) -> str:
        """Return a new prompt of exactly `tokens` tokens."""
        self._seed += 1
        return prompt_of(self._tokenizer, tokens, self._seed)


def measure(server: Server, prompts: Prompts, tokens: int) -> dict[str, float]:
    """Measure one round of one server."""
    with server.awake():
        first = ask(server.url, server.model, prompts.fresh(LONG), 2)
        alone = ask(server.url, server.model, prompts.fresh(SHORT), tokens)
        several = [prompts.fresh(SHORT) for _ in range(STREAMS)]
        together = throughput(server.url, server.model, several, tokens)
    assert first.cached_tokens == 0, "a new prompt was served from a cache"
    return {"first token": first.first, "one stream": 1 / alone.gap, "8 streams": together}


def against_stock(folder: Path, model: Path, prompts: Prompts, rounds: int, tokens: int) -> Rounds:
    """Measure `rounds` rounds of all servers, after one that warms them up."""
    found: Rounds = {figure: defaultdict(list) for figure in TARGETS}
    with stock_servers(folder, model) as servers, cluster(folder, model, "ours") as ours:
        servers = {OURS: ours, **servers}
        names = list(servers)
        for number in range(rounds + 1):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                figures = measure(servers[name], prompts, tokens if number else 4)
                for figure, value in figures.items() if number else ():
                    found[figure][name].append(value)
    return found


def prefix_cache(
    folder: Path, model: Path, prompts: Prompts, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds to the first token of a long prompt: cold, repeated, and cold without a prefix cache."""
    found: dict[str, list[float]] = {"cold": [], "again": [], "no cache": []}
    with (
        cluster(folder, model, "cached") as cached,
        cluster(folder, model, "uncached", "--no-prefix-cache") as uncached,
    ):
        for number in range(rounds + 1):
            prompt = prompts.fresh(LONG)
            order = [("no cache", uncached), ("cold", cached), ("again", cached)]
            for name, server in order if number % 2 else order[1:] + order[:1]:
                answer = ask(server.url, server.model, prompt, 2)
                assert (answer.cached_tokens > 0) == (name == "again"), name
                if number:
                    found[name].append(answer.first)
    return found


def speedups(rounds: Rounds) -> dict[str, dict[str, float]]:
    """Return the speedup over each stock server for each figure: the median of the rounds' ratios."""
    found: dict[str, dict[str, float]] = {}
    for figure, servers in rounds.items():
        turn = -1 if figure == "first token" else 1
        found[figure] = {
            name: statistics.median(
                (ours / theirs) ** turn for ours, theirs in zip(servers[OURS], values, strict=True)
            )
            for name, values in servers.items()
            if name != OURS
        }
    return found


def table(rounds: Rounds) -> str:
    """Return a table of medians, with the speedup over stock mlx-lm in parentheses."""
    ratios = speedups(rounds)
    lines = [
        f"| server | first token of {LONG}, s | one stream, tokens/s | {STREAMS} streams, tokens/s |",
        "| --- | --- | --- | --- |",
    ]
    for name in rounds["one stream"]:
        cells = []
        for figure in ("first token", "one stream", "8 streams"):
            ratio = ratios[figure].get(name)
            shown = "" if ratio is None else f" ({ratio:.2f} x)"
            cells.append(f"{statistics.median(rounds[figure][name]):.2f}{shown}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for figure, wanted in TARGETS.items():
        for name, target in wanted.items():
            verdict = "reached" if ratios[figure][name] >= target else "missed"
            lines.append(
                f"{figure}: {ratios[figure][name]:.2f} x {name}, target {target}: {verdict}"
            )
    return "\n".join([*lines[: 2 + len(rounds["one stream"])], "", *lines[-6:]])


def prefix_ratios(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return medians of the rounds' ratios: a hit over cold, and cold over cold without a cache."""
    pairs = {"again / cold": ("again", "cold"), "cold / no cache": ("cold", "no cache")}
    return {
        name: statistics.median(x / y for x, y in zip(found[a], found[b], strict=True))
        for name, (a, b) in pairs.items()
    }


def main() -> None:
    """Print the tables, publish the figures and check the targets."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_random_model(
            folder / "random",
            hidden=options.hidden,
            layers=options.layers,
            dtype=getattr(mx, options.dtype),
        )
        prompts = Prompts(Tokenizer.load(model))
        print(f"{about()}\n{options}\n", flush=True)
        rounds = against_stock(folder, model, prompts, options.rounds, options.tokens)
        print(table(rounds), flush=True)
        prefix = prefix_cache(folder, model, prompts, options.rounds)
    ratios_by_name = prefix_ratios(prefix)
    medians = ", ".join(
        f"{name} {statistics.median(values):.3f} s" for name, values in prefix.items()
    )
    print(f"\nprefix cache, first token of {LONG}: {medians}")
    print(", ".join(f"{name}: {ratio:.3f}" for name, ratio in ratios_by_name.items()))
    ratios = speedups(rounds)
    publish(
        "servers",
        {"options": vars(options), "rounds": rounds, "speedups": ratios}
        | {"prefix rounds": prefix, "prefix ratios": ratios_by_name},
        {figure: bars(ratios[figure], "times as fast as") for figure in TARGETS}
        | {"prefix cache": bars(ratios_by_name, "time ratio")},
    )


if __name__ == "__main__":
    main()
