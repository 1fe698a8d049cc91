"""Equality of answers, bit for bit: batched with other requests, with drafts, after prefix hits and recoveries.

    python -m tests.bench.exactness --tokens 20000 --exact

Every request is answered alone, without drafts and without a prefix cache. Then engines with drafts of every depth
answer all requests again, up to eight at once, with a prefix cache. Some prompts continue an earlier answer. Now and
then the pipeline fails, and every open answer is rebuilt. Tokens and log-probabilities must have the same bits. Without
`--exact` the table shows how often they differ.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.drafts.controller import MtpMode
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.request import GenerationRequest
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import WorkerLostError
from proto.params import SamplingParams
from tests.bench.dialled_model import FULL_BITS, NOISE, SHAPES, write_dialled_model
from tests.bench.machine import about, parser_of
from tests.bench.texts import held_out_prompts
from tests.support.checkpoints.checkpoints import convert_checkpoint
from tests.support.stages.eager_matches import EagerMatches
from tests.support.stages.local_run import Answered, answer
from tests.support.stages.local_stages import local_stages

MODES = ("1", "2", "4", "auto", "off")
"""Values of --mtp. The last one shows the effect of other requests."""

MOST_TOGETHER = 8
"""Maximum requests at once."""

BUILTIN = "builtin"

LIVE = 0.3
"""Share of their random output that the layers of a written shape keep."""


@dataclass
class Count:
    """The answers that were compared, and those that differed."""

    answers: int = 0
    tokens: int = 0
    answers_with_other_tokens: int = 0
    answers_with_other_logprobs: int = 0

    def compare(self, found: Answered, expected: Answered) -> None:
        """Count one answer."""
        self.answers += 1
        self.tokens += len(found.tokens)
        if found.tokens != expected.tokens:
            self.answers_with_other_tokens += 1
        elif found.logprobs != expected.logprobs:
            self.answers_with_other_logprobs += 1
            entries = zip(found.logprobs, expected.logprobs, strict=True)
            place, pair = next((i, p) for i, p in enumerate(entries) if p[0] != p[1])
            print(f"at token {place}: {pair[0]} for {pair[1]}")


def random_params(rng: random.Random) -> SamplingParams:
    """Return greedy or sampled parameters, with log-probabilities."""
    if rng.random() < 0.3:
        return SamplingParams(logprobs=rng.choice([0, 3]))
    return SamplingParams(
        temperature=rng.choice([0.5, 0.8, 1.0]),
        top_p=rng.choice([1.0, 0.95]),
        top_k=rng.choice([0, 40]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
        seed=rng.randrange(1000),
        logprobs=rng.choice([0, 3]),
    )


def random_requests(
    prompts: Sequence[Sequence[int]], length: int, count: int, rng: random.Random
) -> Iterator[GenerationRequest]:
    """Yield `count` requests with cuts of `prompts`."""
    for _ in range(count):
        prompt = rng.choice(prompts)
        cut = rng.randint(max(1, len(prompt) // 4), len(prompt))
        tokens = rng.randint(length // 2, length)
        yield GenerationRequest(tuple(prompt[:cut]), tokens, random_params(rng))


async def answers_alone(loop: GenerationLoop, requests: list[GenerationRequest], rng: random.Random) -> list[Answered]:
    """Answer one after another. Extends `requests` by prompts that continue some of the answers."""
    found = [await answer(loop, request) for request in requests]
    for request, answered in list(zip(requests, found, strict=True)):
        if rng.random() < 0.25:
            longer = (*request.prompt, *answered.tokens, *request.prompt[:7])
            requests.append(GenerationRequest(longer, request.max_tokens, request.params))
            found.append(await answer(loop, requests[-1]))
    return found


async def answers_together(
    loop: GenerationLoop, requests: Sequence[GenerationRequest], together: int, kills: int
) -> list[Answered]:
    """Answer all requests, up to `together` at once, while the pipeline fails `kills` times."""
    room = asyncio.Semaphore(together)
    failing = {number * len(requests) // (kills + 1) for number in range(1, kills + 1)}
    done = 0

    async def one(request: GenerationRequest) -> Answered:
        """Answer a request when there is room. Fail the pipeline at even parts of the way."""
        nonlocal done
        async with room:
            answered = await answer(loop, request)
        done += 1
        if done in failing and loop.pipeline is not None:
            loop.pipeline.fail(WorkerLostError("the bench fails the pipeline"))
        return answered

    return list(await asyncio.gather(*map(one, requests)))


async def measure(path: Path, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> None:
    """Print what was compared and what differed, by --mtp."""
    rng = random.Random(options.seed)
    checkpoint = Checkpoint.open(path)
    common: dict[str, Any] = {"exact": options.exact}
    if options.dtype:
        common["dtype"] = options.dtype
    count = max(
        4,
        int(options.tokens / (0.75 * options.length * 1.25 * len(options.modes) * len(options.stages))),
    )
    requests = list(random_requests(prompts, options.length, count, rng))
    started = time.perf_counter()
    async with local_stages(checkpoint, mtp=MtpMode(0), prefix_cache=False, **common) as loop:
        expected = await answers_alone(loop, requests, rng)
    print(f"{len(requests)} answers alone: {time.perf_counter() - started:.0f} s", flush=True)
    for mode, stages in itertools.product(options.modes, options.stages):
        started, total = time.perf_counter(), Count()
        order = rng.sample(range(len(requests)), len(requests))
        parsed = MtpMode.parse(mode)
        async with local_stages(checkpoint, mtp=parsed, stages=stages, **common) as loop:
            if options.ngrams:
                loop.scheduler.controller = EagerMatches(parsed)
            asked = [requests[i] for i in order]
            together = MOST_TOGETHER if options.kills else rng.randint(1, MOST_TOGETHER)
            found = await answers_together(loop, asked, together, options.kills)
            recoveries, matched = loop.recoveries, loop.status().ngram_accepted
        for i, one in zip(order, found, strict=True):
            total.compare(one, expected[i])
        print(
            f"| {mode} | {stages} | {matched} | {total.answers} | {total.tokens} | {total.answers_with_other_tokens} | "
            f"{total.answers_with_other_logprobs} | {recoveries} | {time.perf_counter() - started:.0f} s |",
            flush=True,
        )


def model_of(options: argparse.Namespace, folder: Path) -> tuple[Path, list[list[int]]]:
    """Return the checkpoint to answer with, and prompts for it."""
    rng = random.Random(7)
    if options.model != BUILTIN:
        path = folder / options.model
        bits = options.quantize or FULL_BITS
        cycle = write_dialled_model(path, SHAPES[options.model], NOISE, live=LIVE, bits=bits)
        starts = [rng.randrange(len(cycle)) for _ in range(24)]
        rings = [[cycle[(start + i) % len(cycle)] for i in range(600)] for start in starts]
        return path, rings
    prompts = [list(p) for p in held_out_prompts(Tokenizer.load(checkpoint_dir()), 40)]
    if not options.quantize:
        return checkpoint_dir(), prompts
    four = convert_checkpoint(checkpoint_dir(), folder / "quantized", quantize=options.quantize)
    return four, prompts


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=BUILTIN, choices=[BUILTIN, *SHAPES])
    parser.add_argument("--quantize", type=int, choices=[4, 8], help="bits of the weights")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--tokens", type=int, default=20000, help="tokens to compare, about")
    parser.add_argument("--length", type=int, default=80, help="tokens of the longest answer")
    parser.add_argument("--kills", type=int, default=2, help="failures of the pipeline for each --mtp")
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--stages", type=int, nargs="+", default=[1])
    parser.add_argument("--ngrams", action="store_true", help="draft from every match of the text")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"{about()}; {options.model} {options.quantize or ''} {options.dtype or ''} exact={options.exact}")
    print(
        "| --mtp | stages | accepted n-gram drafts | answers | tokens | other tokens | other log-probabilities"
        " | recoveries | time |"
    )
    print("| --- " * 9 + "|")
    with tempfile.TemporaryDirectory() as folder:
        path, prompts = model_of(options, Path(folder))
        asyncio.run(measure(path, prompts, options))


if __name__ == "__main__":
    main()
