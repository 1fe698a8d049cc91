"""Mutated inputs never crash or stall a reader, and never take unbounded memory.

python -m pytest tests/fuzz                          # a few seconds, as in CI
python -m tests.fuzz.test_fuzz --inputs 10000000     # for hours
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc

import pytest

from tests.fuzz.corpus import corpus
from tests.fuzz.mutation import mutate
from tests.fuzz.targets import TARGETS

INPUTS = 400
"""Mutated inputs per target in CI."""

MAX_SECONDS = 2.0
"""Seconds. Bounds one input, with a margin for a busy machine; all take milliseconds."""

MAX_BYTES = 64 * 2**20
"""Bytes. Bounds the memory of a target over all inputs. Inputs have at most 64 KB."""


def run(name: str, inputs: int, seed: int) -> float:
    """Feed the corpus and `inputs` mutations of it to a target, and return the longest time of one input."""
    rng, seeds, longest = random.Random(f"{name} {seed}"), corpus(name), 0.0
    pool = list(seeds)
    for number in range(len(seeds) + inputs):
        data = seeds[number] if number < len(seeds) else mutate(rng.choice(pool), seeds, rng)
        if rng.random() < 0.01:  # mutations of mutations reach further from the corpus
            pool[len(seeds) :] = [*pool[len(seeds) :][-50:], data]
        started = time.perf_counter()
        try:
            TARGETS[name](data)
        except BaseException:
            print(f"target {name}, input {data.hex()}")
            raise
        longest = max(longest, time.perf_counter() - started)
    return longest


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs(name: str) -> None:
    """A target accepts or refuses each input within its bounds of time and memory."""
    tracemalloc.start()
    try:
        assert run(name, INPUTS, seed=0) < MAX_SECONDS
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def main() -> None:
    """Fuzz every target with many inputs and print what was done."""
    parser = argparse.ArgumentParser(description="Fuzz every reader.")
    parser.add_argument("--inputs", type=int, default=100_000, help="over all targets")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for name in TARGETS:
        count, started = arguments.inputs // len(TARGETS), time.monotonic()
        longest = run(name, count, arguments.seed)
        rate = count / (time.monotonic() - started)
        print(
            f"{name}: {count} inputs, {rate:.0f} per second, longest {longest * 1e3:.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
