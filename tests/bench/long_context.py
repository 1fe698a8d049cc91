"""Prefixes of long prompts on real hardware: cold, from memory, from disk after a restart, and over another cut.

    python -m tests.bench.long_context --shape 27B --length 30000

It writes a checkpoint of the shape (`tests.bench.dialled_model`) and serves it from one process with prefixes on disk.
The prompt is asked twice, then a next turn. Then the server starts again, alone and as two workers that hold half the
layers each, and has the same questions. All of them share one GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.bench.dialled_model import BITS, SHAPES, write_dialled_model
from tests.bench.machine import about, parser_of, publish
from tests.bench.real_size import ROOT, Asker, Setup, started, url_of, wait_until_serving

TURN = 300
"""New tokens of a next turn."""

DISK = ("--prefix-disk", "60GB")

QUIET_SECONDS, MOST_QUIET_SECONDS = 2.0, 60.0
"""Seconds without a new byte after which all blocks are on disk, and the bound of that wait."""


@contextmanager
def serving(folder: Path, model: Path, setup: Setup, gpu: int) -> Iterator[str]:
    """Run `setup` and yield its URL."""
    port = 18500 + 10 * setup.workers
    with started(folder, ROOT, model, setup, port, [gpu], DISK) as server:
        wait_until_serving(url_of(port), server)
        yield url_of(port)


def first_tokens(url: str, asked: dict[str, Sequence[int]]) -> dict[str, float]:
    """Return the seconds to the first token of each prompt, and its tokens that were known."""
    row: dict[str, float] = {}
    for name, prompt in asked.items():
        first, _, known = asyncio.run(Asker(url, (), 0).alone(prompt, 4))
        row |= {f"{name}, s": round(first, 3), f"{name}, known": known}
    return row


def wait_until_quiet(state: Path) -> float:
    """Return the seconds until the folder `state` stopped growing."""
    began = newest = time.monotonic()
    size = -1
    while time.monotonic() < min(newest + QUIET_SECONDS, began + MOST_QUIET_SECONDS):
        found = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
        if found != size:
            size, newest = found, time.monotonic()
        time.sleep(0.1)
    return newest - began


def measure(
    folder: Path, model: Path, cycle: Sequence[int], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return the rows of the table."""
    drawn = random.Random(99)
    prompt = drawn.choices(cycle, k=options.length)
    turn = [*prompt, *drawn.choices(cycle, k=TURN)]
    short = {"a short prompt": cycle[:100]}
    table: dict[str, dict[str, float]] = {}
    for mode in options.modes:
        alone = Setup(f"{mode}, one process", ("--mtp", mode, *DISK))
        two = Setup(f"{mode}, two workers", ("--mtp", mode, *DISK), 2)
        with serving(folder, model, alone, options.gpu) as url:
            asked = {**short, "cold": prompt, "again": prompt, "next turn": turn}
            table[alone.name] = first_tokens(url, asked)
            table[alone.name]["on disk after, s"] = wait_until_quiet(folder / alone.folder)
        for index in range(two.workers):
            shutil.copytree(folder / alone.folder, folder / f"{two.folder}-{index}")
        for setup in (alone, two):
            with serving(folder, model, setup, options.gpu) as url:
                asked = {**short, "again": prompt, "next turn": turn}
                table[f"{setup.name}, started again"] = first_tokens(url, asked)
        print({name: row for name, row in table.items() if name.startswith(mode)}, flush=True)
    return table


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="27B")
    parser.add_argument("--length", type=int, default=30_000, help="tokens of the prompt")
    parser.add_argument("--modes", nargs="+", default=["off", "auto"], help="values of --mtp")
    parser.add_argument("--bits", type=int, default=BITS)
    parser.add_argument("--gpu", type=int, default=0, help="the number of the GPU")
    parser.add_argument("--model", type=Path, help="a folder to keep the checkpoint in")
    options = parser.parse_args()
    print(about(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        model = options.model or Path(name) / "model"
        cycle = write_dialled_model(model, SHAPES[options.shape], bits=options.bits)
        publish("long_context", measure(Path(name), model, cycle, options))


if __name__ == "__main__":
    main()
