"""Mutated inputs never crash or stall a reader, and never take unbounded memory.

python -m pytest tests/fuzz                                    # a few seconds, as in CI
python -m tests.fuzz.test_fuzz --inputs 10000000               # over all targets
python -m tests.fuzz.test_fuzz --hours 8 --targets http,hub
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import random
import time
import tracemalloc
from collections.abc import Iterator

import psutil
import pytest

from tests.fuzz.corpus import corpus
from tests.fuzz.mutation import mutate
from tests.fuzz.targets import TARGETS

INPUTS = 400
"""Mutated inputs per target in CI."""

MAX_SECONDS = 2.0
"""Seconds. Bounds one input, with a margin for a busy machine; all take milliseconds."""

HANG_SECONDS = 60.0
"""Seconds. A long run ends with a traceback when WATCHED inputs take longer than this plus their usual time."""

WATCHED = 100

MAX_BYTES = 64 * 2**20
"""Bytes. Bounds the memory of a target over all inputs. Inputs have at most 64 KB."""


def inputs(name: str, seed: int) -> Iterator[bytes]:
    """Yield the corpus of a target, then mutations of it without end."""
    rng, seeds = random.Random(f"{name} {seed}"), corpus(name)
    pool = list(seeds)
    yield from seeds
    while True:
        data = mutate(rng.choice(pool), seeds, rng)
        if rng.random() < 0.01:  # mutations of mutations reach further from the corpus
            pool[len(seeds) :] = [*pool[len(seeds) :][-50:], data]
        yield data


def run(name: str, count: int, seed: int, stop: float = float("inf")) -> tuple[int, float]:
    """Feed up to `count` inputs to a target until the monotonic time `stop`.

    Return the number of inputs and the longest time of one.
    """
    longest, done, target = 0.0, 0, TARGETS[name]
    for data in inputs(name, seed):
        started = time.perf_counter()
        try:
            target(data)
        except BaseException:
            print(f"target {name}, input {data.hex()}")
            raise
        longest = max(longest, time.perf_counter() - started)
        done += 1
        if done >= count or time.monotonic() > stop:
            break
        if done % WATCHED == 0 and stop < float("inf"):
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    faulthandler.cancel_dump_traceback_later()
    return done, longest


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs(name: str) -> None:
    """A target accepts or refuses each input within its bounds of time and memory."""
    tracemalloc.start()
    try:
        _, longest = run(name, INPUTS, seed=0)
        assert longest < MAX_SECONDS
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def main() -> None:
    """Fuzz every target and print, ten times per target, inputs, speed, longest time and resident memory."""
    parser = argparse.ArgumentParser(description="Fuzz every reader.")
    parser.add_argument("--inputs", type=int, default=100_000, help="over all targets")
    parser.add_argument("--hours", type=float, default=1000.0, help="over all targets")
    parser.add_argument("--targets", default=",".join(TARGETS), help="names, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # refusals are expected
    names = arguments.targets.split(",")
    for name in names:
        share, seconds = arguments.inputs // len(names), arguments.hours * 3600 / len(names)
        for part in range(10):
            started = time.monotonic()
            seed = 10 * arguments.seed + part
            done, longest = run(name, share // 10, seed, started + seconds / 10)
            rate = done / (time.monotonic() - started)
            memory = psutil.Process().memory_info().rss / 2**20
            print(
                f"{name} {part + 1}/10: {done} inputs, {rate:.0f} per second, longest {longest * 1e3:.1f} ms, "
                f"{memory:.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
