"""Benchmark of `--mtp auto` against every fixed depth and stock mlx-lm: interleaved in one process, medians.

    python -m tests.bench.auto_depth

In each round every engine continues from the same prompt. The order rotates, so that the load of the machine affects
all engines equally. The ratios within a round are compared. `auto` starts every round without knowledge, like
`mtp-coord generate`, and pays for its exploration.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from coordinator.depth.controller import Controller, MtpMode
from coordinator.schedule.local_generator import local_generator
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.request import GenerationRequest
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.params import SamplingParams
from tests.bench.machine import about
from tests.bench.report import bars, publish
from tests.bench.texts import held_out_prompts
from tests.support.stages.local_run import answer

MODES = ("off", "1", "2", "3", "4", "auto")
FIXED = MODES[:-1]
STOCK = "mlx-lm"


@dataclass(frozen=True)
class Timed:
    """One answer: tokens per second after the first token, and tokens per window."""

    speed: float
    tokens_per_window: float


Rounds = Mapping[str, Sequence[Timed]]
"""One measurement per round, by mode."""


async def measure(
    path: Path,
    dtype: str,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    params: SamplingParams,
) -> Rounds:
    """Run a round for each prompt, after one that warms everything up."""
    found: defaultdict[str, list[Timed]] = defaultdict(list)
    checkpoint = Checkpoint.open(path)
    stock, _ = load_model(path)
    stock.set_dtype(getattr(mx, dtype))
    async with AsyncExitStack() as stack:
        engines = {
            mode: await stack.enter_async_context(
                local_generator(checkpoint, mtp=MtpMode.parse(mode), dtype=dtype)
            )
            for mode in MODES
        }
        for number, prompt in enumerate([prompts[0], *prompts]):
            request = GenerationRequest(prompt, tokens, replace(params, seed=number))
            first = number % len(MODES)
            timed = {
                mode: await of_engine(engines[mode], request)
                for mode in (*MODES[first:], *MODES[:first])
            }
            timed[STOCK] = of_stock(stock, request)
            for mode, one in timed.items() if number else ():
                found[mode].append(one)
    return found


async def of_engine(loop: GenerationLoop, request: GenerationRequest) -> Timed:
    """Return one answer of an engine with a new controller."""
    loop.scheduler.controller = Controller(loop.scheduler.controller.mode)
    stats = (await answer(loop, request)).stats
    after_first = stats.completion_tokens - 1
    return Timed(after_first / stats.decode_seconds, after_first / stats.windows)


def of_stock(model: nn.Module, request: GenerationRequest) -> Timed:
    """Return one answer of mlx-lm's own loop, greedy."""
    prompt = mx.array(request.prompt, mx.uint32)
    steps = generate_step(prompt, model, max_tokens=request.max_tokens)
    next(steps)
    started = time.perf_counter()
    count = sum(1 for _ in steps)
    return Timed(count / (time.perf_counter() - started), 1.0)


def table(rounds: Rounds) -> str:
    """Return a Markdown table of medians, with the speed of each mode over the best fixed depth."""
    speeds = {mode: [one.speed for one in timed] for mode, timed in rounds.items()}
    best = max(FIXED, key=lambda mode: statistics.median(speeds[mode]))
    lines = [
        f"| --mtp | tokens/s | tokens a window | over the best fixed, {best} |",
        "| --- | --- | --- | --- |",
    ]
    for mode in (*MODES, STOCK):
        speed = statistics.median(speeds[mode])
        width = statistics.median(one.tokens_per_window for one in rounds[mode])
        ratios = [a / b for a, b in zip(speeds[mode], speeds[best], strict=True)]
        lines.append(f"| {mode} | {speed:.1f} | {width:.2f} | {statistics.median(ratios):.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    parser.add_argument("--model", type=Path, default=checkpoint_dir())
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    prompts = held_out_prompts(Tokenizer.load(options.model), options.rounds)
    params = SamplingParams(temperature=options.temp)
    rounds = asyncio.run(measure(options.model, options.dtype, prompts, options.tokens, params))
    print(f"{about()}\n{options}\n\n{table(rounds)}")
    medians = {
        mode: statistics.median(one.speed for one in timed) for mode, timed in rounds.items()
    }
    publish(
        "auto_depth",
        {
            "options": {**vars(options), "model": options.model.name},
            "rounds": {mode: [asdict(one) for one in timed] for mode, timed in rounds.items()},
        },
        {"decode": bars(medians, "tokens/s")},
    )


class _Help(argparse.RawDescriptionHelpFormatter):
    """A formatter that keeps the lines of the example."""


if __name__ == "__main__":
    main()
