"""An answer that repeats its prompt with changes, with the drafts of the head alone and with n-grams of the text.

    python -m tests.bench.edits --shape four --stages 1 2

The model has predictable text and a head of a chosen accuracy (`tests.bench.dialled_model`). Its text is a walk through
a cycle of words. The prompt of an edit is that walk with some words changed, so the answer repeats the prompt between
the changes. The prompt of the other rows are random words, and the answer repeats nothing. All programs run in this
process and take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from coordinator.drafts.controller import MtpMode
from coordinator.drafts.prompt_lookup import NgramMode
from coordinator.schedule.local_generator import local_generator
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.prompts import Limits
from coordinator.schedule.request import Finished, GenerationRequest, TokenChunk, generate
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.params import SamplingParams
from tests.bench.dialled_model import BITS, FULL_BITS, SHAPES, write_dialled_model
from tests.bench.machine import about
from tests.bench.report import bars, publish

CONTEXT = 32768

EOS = 4095

MOST_WORDS = 20_000
"""Words of the cycle of a large vocabulary. Nothing decodes them."""


@dataclass(frozen=True)
class Asked:
    """An answer: its tokens, and the tokens a second after the first piece."""

    tokens: list[int]
    speed: float


def edited(cycle: Sequence[int], tokens: int, changes: int, chance: random.Random) -> list[int]:
    """Return a walk of `tokens` words with `changes` of them replaced, and then the word before its first."""
    start = chance.randrange(len(cycle))
    walk = [cycle[(start + i) % len(cycle)] for i in range(tokens)]
    for place in chance.sample(range(tokens), changes):
        walk[place] = chance.choice(cycle)
    return [*walk, cycle[start - 1]]


async def ask(
    loop: GenerationLoop, prompt: Sequence[int], tokens: int, temperature: float
) -> Asked:
    """Return the answer of `tokens` tokens to `prompt`."""
    params = SamplingParams(temperature=temperature, seed=3)
    request = GenerationRequest(tuple(prompt), tokens, params, frozenset())
    found: list[int] = []
    stats = None
    async for event in generate(loop, request):
        if isinstance(event, TokenChunk):
            found += event.tokens
        elif isinstance(event, Finished):
            assert event.error is None, event.error
            stats = event.stats
    assert stats is not None
    return Asked(found, (len(found) - 1) / stats.decode_seconds)


async def loops(
    checkpoint: Checkpoint, stack: AsyncExitStack, stages: int, options: argparse.Namespace
) -> AsyncIterator[tuple[str, GenerationLoop]]:
    """Yield the name and the loop of each program of `stages` stages."""
    limits = Limits(CONTEXT, checkpoint.config.vocab_size)
    for mode in options.mtp:
        for ngram in NgramMode:
            started = local_generator(
                checkpoint,
                stages=stages,
                dtype=options.dtype,
                mtp=MtpMode.parse(mode),
                ngram=ngram,
                prefix_cache=False,
                limits=limits,
            )
            name = f"{stages} stages, --mtp {mode}, --ngram {ngram}"
            yield name, await stack.enter_async_context(started)


async def measure(
    path: Path, cycle: Sequence[int], stages: int, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return the median tokens a second of every program, for edits and for other text."""
    checkpoint = Checkpoint.open(path)
    speeds: dict[str, dict[str, list[float]]] = {}
    async with AsyncExitStack() as stack:
        found = [one async for one in loops(checkpoint, stack, stages, options)]
        for number in range(options.rounds + 1):
            chance = random.Random(number)
            prompts = {
                "edit": edited(cycle, options.tokens, options.changes, chance),
                "other": chance.choices(cycle, k=options.tokens),
            }
            for text, prompt in prompts.items():
                answers = []
                for name, loop in found:
                    answer = await ask(loop, prompt, options.tokens, options.temperature)
                    answers.append(answer.tokens)
                    if number:  # the first round measures costs and compiles kernels
                        speeds.setdefault(name, {}).setdefault(text, []).append(answer.speed)
                different = sum(one != answers[0] for one in answers)
                assert options.any_bits or not different, f"{different} answers differ in {text}"
    return {
        name: {text: statistics.median(values) for text, values in row.items()}
        for name, row in speeds.items()
    }


def main() -> None:
    """Run the programs of each number of stages, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="four")
    parser.add_argument("--stages", type=int, nargs="+", default=[1])
    parser.add_argument("--mtp", nargs="+", default=["auto"])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--changes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--bits", type=int, choices=(BITS, FULL_BITS), default=BITS)
    parser.add_argument("--dtype", help="the type of the weights, such as float32")
    parser.add_argument("--noise", type=float, default=17.0)
    parser.add_argument("--model", type=Path, help="a folder to keep the checkpoint in")
    parser.add_argument(
        "--any-bits",
        action="store_true",
        help="answers may differ: windows of other widths round differently",
    )
    options = parser.parse_args()
    print(about(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder) / "model"
        shape = SHAPES[options.shape]
        cycle = list(range(min(shape.vocab, MOST_WORDS)))
        cycle = [token for token in cycle if token != EOS]
        assert options.tokens < len(cycle), "a longer text repeats itself"
        write_dialled_model(path, shape, options.noise, bits=options.bits, cycle=cycle)
        table: dict[str, dict[str, float]] = {}
        for stages in options.stages:
            table |= asyncio.run(measure(path, cycle, stages, options))
    for name, row in table.items():
        print(
            f"{name}: " + ", ".join(f"{text} {speed:.1f} tokens/s" for text, speed in row.items())
        )
    for name, row in table.items():
        before = table.get(name.replace("--ngram auto", "--ngram off"), row)
        if before is not row:
            ratios = {text: round(row[text] / before[text], 2) for text in row}
            print(f"{name}, over off: {ratios}")
    edits = {name: row["edit"] for name, row in table.items()}
    publish("edits", table, {"edits, tokens/s": bars(edits, "tokens/s")})


if __name__ == "__main__":
    main()
