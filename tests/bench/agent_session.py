"""A session of an agent over two workers with prefixes on disk, and a restart of all processes in the middle.

    python -m tests.bench.agent_session --turns 40

Each turn sends the whole history, the answer of the turn before and a new piece. The table has the first token of each
turn. Some turns are sent again to a process without a prefix cache, which must answer with the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from proto.state_dir import STATE_DIR
from tests.bench.machine import about, parser_of
from tests.bench.real_size import answer
from tests.bench.report import bars, publish
from tests.bench.texts import held_out_prompts
from tests.support.processes.processes import (
    as_coordinator,
    as_worker,
    ending,
    launch_coordinator,
    launch_worker,
    serving,
)

WORKERS = 2
DISK = ("--prefix-disk", "2GB")


@dataclass(frozen=True)
class Turn:
    """A turn of the session: its prompt in tokens, how many of them were known, and the seconds to its first token."""

    prompt: int
    cached: int
    first: float
    cold: float | None = None
    """Seconds to the first token without a prefix cache, for some turns."""


@contextmanager
def cluster(folder: Path, model: str, name: str) -> Iterator[str]:
    """Run two workers with disks of their own, and yield the URL. The disks are those of earlier runs in `folder`."""
    own = folder / name
    own.mkdir()
    workers = []
    for index in range(WORKERS):
        state = str(folder / f"disk-{index}")
        worker = launch_worker(own, f"w{index}", "--model", model, "--state-dir", state, *DISK)
        workers.append(worker)
    addresses = [as_worker(worker).address for worker in workers]
    flags = tuple(word for address in addresses for word in ("--worker", address))
    env = {STATE_DIR: str(folder / "coordinator")}
    server = launch_coordinator(own, "--model", model, *flags, "--nodes", "2", env=env)
    with ending(server), ending(workers[0]), ending(workers[1]):
        yield as_coordinator(server).url


def ask(url: str, prompt: Sequence[int], tokens: int) -> tuple[float, int, list[int]]:
    """Return the seconds to the first token, the tokens of the prompt that were known, and the answer's tokens."""

    async def one() -> dict[str, Any]:
        """Return the times and the usage of a streamed answer of one token."""
        async with httpx.AsyncClient(timeout=600.0) as client:
            return await answer(client, url, prompt, 1)

    first = asyncio.run(one())
    body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(
        f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=600.0
    ).json()
    known = int(first["usage"]["prompt_tokens_details"]["cached_tokens"])
    return first["first"] - first["asked"], known, reply["choices"][0]["token_ids"]


def session(folder: Path, model: str, options: argparse.Namespace) -> list[Turn]:
    """Return the turns. Raises AssertionError if an answer has other tokens than that of one process."""
    texts = held_out_prompts(Tokenizer.load(checkpoint_dir()), 400)
    words = [token for text in texts for token in text]
    history, turns = words[: options.start], list[Turn]()
    words = words[options.start :]
    cold_folder = folder / "cold"
    cold_folder.mkdir()
    with serving(cold_folder, model, [], "--no-prefix-cache", name="cold") as cold:
        for part in range(2):
            with cluster(folder, model, f"run-{part}") as url:
                for number in range(options.turns // 2):
                    started = time.perf_counter()
                    first, cached, tokens = ask(url, history, options.answer)
                    without = None
                    if number % options.compare == 0:
                        without, _, expected = ask(cold.url, history, options.answer)
                        assert tokens == expected, f"turn {len(turns)} has other tokens"
                    turns.append(Turn(len(history), cached, first, without))
                    print(turns[-1], f"{time.perf_counter() - started:.1f} s", flush=True)
                    history += tokens + words[: options.new]
                    words = words[options.new :]
    return turns


def main() -> None:
    """Print the table of turns."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--start", type=int, default=1000, help="tokens of the first turn")
    parser.add_argument("--new", type=int, default=60, help="new tokens of a turn")
    parser.add_argument("--answer", type=int, default=20, help="tokens of an answer")
    parser.add_argument("--compare", type=int, default=5, help="compare each such turn with cold")
    options = parser.parse_args()
    print(f"{about()}\n{options}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        turns = session(Path(name), options.model, options)
    print("\n| turn | prompt | known | first token, s | cold, s |\n| --- | --- | --- | --- | --- |")
    for number, turn in enumerate(turns):
        cold = "-" if turn.cold is None else f"{turn.cold:.2f} ({turn.first / turn.cold:.3f})"
        print(f"| {number} | {turn.prompt} | {turn.cached} | {turn.first:.3f} | {cold} |")
    chart = {str(number): turn.first for number, turn in enumerate(turns)}
    publish(
        "agent_session",
        {"options": vars(options), "turns": [vars(turn) for turn in turns]},
        {"first token": bars(chart, "s")},
    )


if __name__ == "__main__":
    main()
