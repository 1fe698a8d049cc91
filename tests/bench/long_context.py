"""Long prompts on real hardware: speed by length, prefixes from memory and from disk, and quantized keys and values.

    python -m tests.bench.long_context --shape 27B

It writes a checkpoint of the shape (`tests.bench.dialled_model`) and runs servers on one GPU, one after another: plain,
`--mtp auto`, both with prefixes on disk, and plain with `--kv-bits`. Each has answers after prompts of every length.
A server with a disk is asked the longest prompt again, then a next turn. Then it starts again, alone and as two workers
that hold half the layers each, and has the same questions.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.bench.dialled_model import BITS, SHAPES, write_dialled_model
from tests.bench.machine import about, parser_of
from tests.bench.real_size import ROOT, answer, program, url_of, wait_until_serving
from tests.bench.report import bars, publish
from tests.support.processes.reserved_port import reserved_port

LENGTHS = (2000, 8000, 16000, 30000)
"""Tokens of the prompts by default."""

ANSWER = 150
"""Tokens of an answer."""

TURN = 300
"""New tokens of a next turn."""

DISK = ("--prefix-disk", "60GB")

QUIET_SECONDS, MOST_QUIET_SECONDS = 2.0, 60.0
"""Seconds without a new byte after which all blocks are on disk, and the bound of that wait."""

ROWS: dict[str, tuple[str, ...]] = {
    "plain": ("--mtp", "off"),
    "auto": ("--mtp", "auto"),
    "plain, disk": ("--mtp", "off", *DISK),
    "auto, disk": ("--mtp", "auto", *DISK),
    "plain, 8 bits": ("--mtp", "off", "--kv-bits", "8"),
    "plain, 4 bits": ("--mtp", "off", "--kv-bits", "4"),
}


@contextmanager
def serving(
    folder: Path, model: Path, state: Path, workers: Sequence[Path], gpu: int, *flags: str
) -> Iterator[str]:
    """Serve `model` alone, or over a worker for each state directory of `workers`. Yield the URL.

    All of them share one GPU.
    """
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(1 + len(workers))]
        where = ["--nodes", str(len(workers))] if workers else ["--single-node"]
        for index, own in enumerate(workers):
            at = f"127.0.0.1:{ports[1 + index]}"
            worker = ["--listen", at, "--model", str(model), "--no-mdns", "--state-dir", str(own)]
            name = f"worker-{ports[1 + index]}"
            stack.enter_context(program(folder, name, ROOT, gpu, "worker.cli", *worker, *DISK))
            where += ["--worker", at]
        command = ["serve", str(model), "--port", str(ports[0]), "--no-mdns", *where]
        command += ["--state-dir", str(state), *flags]
        name = f"server-{ports[0]}"
        server = stack.enter_context(program(folder, name, ROOT, gpu, "coordinator.cli", *command))
        wait_until_serving(url_of(ports[0]), server)
        yield url_of(ports[0])


def ask(url: str, prompt: Sequence[int], tokens: int) -> tuple[float, float, int]:
    """Return the seconds to the first token, the tokens a second after it, and the known tokens of the prompt."""

    async def one() -> tuple[float, float, int]:
        """Ask once."""
        async with httpx.AsyncClient(timeout=600.0) as client:
            found = await answer(client, url, prompt, tokens)
        after, span = found["usage"]["completion_tokens"] - 1, found["last"] - found["first"]
        known = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found["first"] - found["asked"], after / span if span else 0.0, known

    return asyncio.run(one())


def by_length(
    url: str, cycle: Sequence[int], lengths: Sequence[int], seed: int
) -> dict[str, float]:
    """Return the first token and the speed after prompts of every length."""
    drawn, row = random.Random(seed), dict[str, float]()
    for _ in range(2):
        ask(url, drawn.choices(cycle, k=lengths[0]), 64)
    for length in lengths:
        first, row[f"tokens/s at {length}"], _ = ask(url, drawn.choices(cycle, k=length), ANSWER)
        row[f"first token of {length}, s"] = first
    return row


def wait_until_quiet(state: Path) -> float:
    """Return the seconds until the folder `state` stopped growing."""
    started = newest = time.monotonic()
    size = -1
    while time.monotonic() < min(newest + QUIET_SECONDS, started + MOST_QUIET_SECONDS):
        found = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
        if found != size:
            size, newest = found, time.monotonic()
        time.sleep(0.1)
    return newest - started


def warm(url: str, prompt: Sequence[int], turn: Sequence[int]) -> dict[str, float]:
    """Return the first tokens of a known prompt and of the turn after it, with the tokens that were known."""
    row: dict[str, float] = {}
    for name, tokens in (("again", prompt), ("next turn", turn)):
        first, _, known = ask(url, tokens, 4)
        row |= {f"{name}, s": first, f"{name}, known": known}
    return row


def measure(
    folder: Path, model: Path, cycle: Sequence[int], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return the rows of the table."""
    table: dict[str, dict[str, float]] = {}
    for name in options.rows:
        flags, state = ROWS[name], folder / name.replace(", ", "-").replace(" ", "-")
        with serving(folder, model, state, (), options.gpu, *flags) as url:
            row = by_length(url, cycle, options.lengths, len(table))
            if DISK[0] in flags:
                drawn = random.Random(99)
                prompt = drawn.choices(cycle, k=options.lengths[-1])
                row["cold, s"], _, _ = ask(url, prompt, 4)
                row |= warm(url, prompt, [*prompt, *drawn.choices(cycle, k=TURN)])
                row["on disk after, s"] = wait_until_quiet(state)
        table[name] = row
        print(f"{name}: {rounded(row)}", flush=True)
        if DISK[0] in flags:
            other = [folder / f"{state.name}-{index}" for index in range(2)]
            for copy in other:
                shutil.copytree(state, copy)
            for again, workers in (("started again", ()), ("two workers", other)):
                with serving(folder, model, state, workers, options.gpu, *flags) as url:
                    ask(url, cycle[:100], 4)
                    turn = [*prompt, *random.Random(7).choices(cycle, k=TURN)]
                    table[f"{name}, {again}"] = found = warm(url, prompt, turn)
                print(f"{name}, {again}: {rounded(found)}", flush=True)
    return table


def rounded(row: dict[str, float]) -> dict[str, float]:
    """Return the figures with three digits after the point."""
    return {name: round(value, 3) for name, value in row.items()}


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="27B")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--bits", type=int, default=BITS)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--gpu", type=int, default=0, help="the number of the GPU")
    parser.add_argument("--model", type=Path, help="a folder to keep the checkpoint in")
    options = parser.parse_args()
    print(about(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        model = options.model or Path(name) / "model"
        cycle = write_dialled_model(model, SHAPES[options.shape], bits=options.bits)
        table = measure(Path(name), model, cycle, options)
    column = f"tokens/s at {options.lengths[-1]}"
    speeds = {name: row[column] for name, row in table.items() if column in row}
    publish("long_context", table, {column: bars(speeds, "tokens/s")})


if __name__ == "__main__":
    main()
