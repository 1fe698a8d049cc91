"""Equality of answers, bit for bit, in groups of machines: real programs, drafts, and a killed member.

    python -m tests.bench.group_exactness --tokens 100000 --model four

One process answers every request alone, without drafts and without a prefix cache. Each group then answers all of them
with drafts, up to eight at once, while one of its processes is killed. Tokens and log-probabilities must have the same
bits. All programs run with `--exact --slices`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.bench.dialled_model import SHAPES
from tests.bench.exactness import BUILTIN, MOST_TOGETHER, Count, model_of, random_requests
from tests.bench.machine import about, parser_of
from tests.bench.real_size import gpus
from tests.chaos.storm import members_of
from tests.support.processes.processes import (
    Coordinator,
    Worker,
    as_coordinator,
    as_worker,
    ending,
    launch_coordinator,
    launch_worker,
)

START_SECONDS = 300.0
"""Seconds. Longest wait until a model is served. Kernels that are not on disk yet take minutes to compile."""

ANSWER_SECONDS = 600.0

ANY_LINK = "from coordinator.planning import groups; groups.SLOWEST_COLLECTIVE = 10.0"
"""A coordinator refuses groups whose sums are slow, which they are where members share a core."""


@dataclass(frozen=True)
class Answered:
    """The tokens of an answer and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


@contextmanager
def running(
    folder: Path, model: str, count: int, *flags: str
) -> Iterator[tuple[Coordinator, list[Worker]]]:
    """Run `count` workers with a GPU each where there are several, or one process, and a coordinator."""
    with ExitStack() as stack:
        workers = []
        for index in range(count):
            env = {"CUDA_VISIBLE_DEVICES": str(index % gpus())} if gpus() else {}
            name = f"{folder.name}-{index}"
            worker = launch_worker(folder, name, "--model", model, env=env)
            workers.append(stack.enter_context(ending(worker)))
        ready = [as_worker(worker, START_SECONDS) for worker in workers]
        where = [flag for worker in ready for flag in ("--worker", worker.address)]
        where += ["--wait", str(START_SECONDS)] if ready else ["--single-node"]
        server = launch_coordinator(folder, "--model", model, *where, *flags, before=ANY_LINK)
        stack.enter_context(ending(server))
        yield as_coordinator(server, START_SECONDS), ready


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answered:
    """Return the tokens and log-probabilities of an answer. Raises AssertionError if it is refused."""
    reply = await client.post(f"{url}/v1/completions", json=body)
    assert reply.status_code == httpx.codes.OK, reply.text[:500]
    choice = reply.json()["choices"][0]
    return Answered(choice["token_ids"], choice["logprobs"]["token_logprobs"])


async def ask_all(
    url: str, bodies: Sequence[dict[str, Any]], together: int, workers: Sequence[Worker] = ()
) -> list[Answered]:
    """Return all answers, at most `together` at once. A process of the group is killed on the way, if there is one."""
    room, done = asyncio.Semaphore(together), 0

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> Answered:
        """Answer a request when there is room. Kill a process at half of the way."""
        nonlocal done
        async with room:
            answered = await ask(client, url, body)
        done += 1
        if done == len(bodies) // 2 and workers:
            members_of(workers[-1].pid)[0].kill()
        return answered

    async with httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
        return list(await asyncio.gather(*(one(client, body) for body in bodies)))


def bodies_of(
    prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the requests as JSON. Their number gives about `options.tokens` compared tokens."""
    count = max(4, int(options.tokens / (0.75 * options.length * len(options.groups))))
    found = []
    cut = [prompt[: options.prompt] for prompt in prompts]
    for request in random_requests(cut, options.length, count, random.Random(options.seed)):
        params = request.params
        found.append(
            {
                "prompt": list(request.prompt),
                "max_tokens": request.max_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "min_p": params.min_p,
                "repetition_penalty": params.repetition_penalty,
                "seed": params.seed,
                "logprobs": 1,
                "return_token_ids": True,
                "ignore_eos": True,
            }
        )
    return found


def measure(
    folder: Path, model: str, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """Return what was compared and what differed, by group."""
    bodies, rows = bodies_of(prompts, options), {}
    common = ["--exact", "--slices", str(options.slices)]
    common += ["--dtype", options.dtype] if options.dtype else []
    (folder / "alone").mkdir()
    started = time.perf_counter()
    alone = ("--mtp", "off", "--no-prefix-cache")
    with running(folder / "alone", model, 0, *common, *alone) as (server, _):
        expected = asyncio.run(ask_all(server.url, bodies, 1))
    print(f"{len(bodies)} answers alone: {time.perf_counter() - started:.0f} s", flush=True)
    for number, group in enumerate(options.groups):
        parallel, _, count = group.partition(":")
        own, started, total = folder / f"group-{number}", time.perf_counter(), Count()
        own.mkdir()
        flags = (*common, "--mtp", options.mtp, "--parallel", parallel)
        with running(own, model, int(count), *flags) as (server, workers):
            found = asyncio.run(ask_all(server.url, bodies, MOST_TOGETHER, workers))
            restarts = len(server.records("cluster: serving")) - 1
        for one, wanted in zip(found, expected, strict=True):
            total.compare(one, wanted)
        rows[group] = vars(total) | {"plans after the first": restarts}
        print(
            f"| {group} | {total.answers} | {total.tokens} | {total.answers_with_other_tokens} | "
            f"{total.answers_with_other_logprobs} | {restarts} | {time.perf_counter() - started:.0f} s |",
            flush=True,
        )
    return rows


def main() -> None:
    """Print the table, and the facts as JSON with --out."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=BUILTIN, choices=[BUILTIN, *SHAPES])
    parser.add_argument("--quantize", type=int, choices=[4, 8], help="bits of the weights")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--groups", nargs="+", default=["tensor:2", "tensor:4", "2x2:4"])
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--mtp", default="auto")
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens to compare, about")
    parser.add_argument("--length", type=int, default=80, help="tokens of the longest answer")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the longest prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(f"{about()}; {options.model} {options.quantize or ''} {options.dtype or ''}")
    print("| group | answers | tokens | other tokens | other log-probabilities | plans | time |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, prompts = model_of(options, folder)
        rows = measure(folder, str(path), prompts, options)
    if options.out:
        options.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
