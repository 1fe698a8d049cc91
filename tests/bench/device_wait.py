"""A bench of the time that the device waits between tokens, in one process with plain decoding.

    python -m tests.bench.device_wait
    python -m tests.bench.device_wait --model 27B --prompt 512

The time from token to token through loop, scheduler and pipeline, over the device's own time for a step. The device's
time comes from a chain of steps that Python builds completely before the device begins, so it includes MLX's launches
but no Python. On the CPU MLX slows such chains down, so this figure is for GPUs. Rounds with and without running ahead
alternate. `--prompt` is the length of the prompt in tokens. The last column is the peak memory beyond the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx

from coordinator.generation import scheduler
from coordinator.generation.loop import GenerationLoop
from coordinator.generation.request import GenerationRequest, TokenChunk
from coordinator.local_engine.generator import local_generator
from coordinator.pipeline.local import LocalPipeline
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.depth.controller import MtpMode
from proto.frame import Admit, Evict, Frame, Segment
from proto.frame_stamps import FrameStamps, StageStep
from tests.bench.dialled_model import SHAPES, write_dialled_model
from tests.bench.machine import about
from tests.bench.report import bars, publish
from worker.engine.stage_engine import StageEngine
from worker.model.verifier import Verifier

CHAIN = 8
"""Steps of a chain. All of its activations are in memory at once, and every step copies the K/V caches at most once."""


def device_seconds(engine: StageEngine, seq_id: int, prompt: tuple[int, ...], rounds: int) -> float:
    """Return the median seconds of a step in a chain that is built before it runs. Runs on the engine thread."""

    def begin(ops: tuple[Admit | Evict, ...], *segments: Segment) -> mx.array:
        """Begin a frame and return its lazy tokens."""
        frame = Frame(engine.epoch, engine.frames_done, ops, segments)
        begun = engine.begin(frame, FrameStamps(0, StageStep))
        return begun.verdict.choices[0].tokens if begun.verdict is not None else mx.zeros(1)

    found, length = [], len(prompt)
    steps = CHAIN * rounds
    admit = Admit(seq_id, length + steps + 1, length)
    mx.eval(begin((admit,), Segment(seq_id, 0, 0, prompt, sample=True)))
    step = 0
    for _ in range(rounds):
        with patch.object(mx, "async_eval"):
            for _ in range(CHAIN):
                engine.sequences[seq_id].commit(step, 1, in_header=True)
                ahead = Segment(
                    seq_id, step + 1, length + step, (), open=True, sample=True, continues=True
                )
                tokens = begin((), ahead)
                step += 1
        states = list(engine.sequences[seq_id].arrays())
        started = time.perf_counter()
        mx.eval(tokens, *states)
        found.append((time.perf_counter() - started) / CHAIN)
    begin((Evict(seq_id),))
    return statistics.median(found)


async def token_seconds(loop: GenerationLoop, prompt: tuple[int, ...], tokens: int) -> float:
    """Return the median seconds from token to token of one plain answer."""
    moments = []
    async for event in loop.generate(GenerationRequest(prompt, tokens)):
        if isinstance(event, TokenChunk):
            moments.append(time.perf_counter())
    moments = moments[4:]  # the first ones compile, or wait for the prompt
    return statistics.median(b - a for a, b in pairwise(moments))


async def measure(options: argparse.Namespace, path: Path, prompt: tuple[int, ...]) -> None:
    """Run the rounds and print the table."""
    async with AsyncExitStack() as stack:
        checkpoint = Checkpoint.open(path)
        local = local_generator(checkpoint, mtp=MtpMode.parse("off"), prefix_cache=False)
        loop = await stack.enter_async_context(local)
        pipeline = loop.pipeline
        assert isinstance(pipeline, LocalPipeline)

        def make_engine() -> StageEngine:
            """Return a second engine over the stage of the pipeline."""
            stage = pipeline._engines[0].stage
            verifier = Verifier(stage.modules, stage.kv_format)
            return StageEngine(stage, epoch=0, first=True, verifier=verifier)

        engine = await pipeline.thread.call(make_engine)
        weights = mx.get_active_memory()
        rows: dict[str, list[float]] = {"device": [], "ahead": [], "in turn": []}
        peaks: dict[str, int] = {}
        for number in range(options.rounds + 1):
            for name, row in rows.items():
                mx.reset_peak_memory()
                if name == "device":
                    seconds = await pipeline.thread.call(
                        partial(device_seconds, engine, number, prompt, 4)
                    )
                elif name == "ahead":
                    seconds = await token_seconds(loop, prompt, options.tokens)
                else:
                    with patch.object(scheduler, "sequences_to_run_ahead", lambda *_: []):
                        seconds = await token_seconds(loop, prompt, options.tokens)
                peaks[name] = mx.get_peak_memory() - weights
                if number:  # the first round warms up
                    row.append(seconds)
    print("| | ms a token | over the device's time | peak, MB |\n| --- | --- | --- | --- |")
    device = rows["device"]
    figures = {}
    for name, row in rows.items():
        over = statistics.median(a / b for a, b in zip(row, device, strict=True))
        milliseconds = statistics.median(row) * 1e3
        figures[name] = {"ms": milliseconds, "over": over, "peak": peaks[name]}
        print(f"| {name} | {milliseconds:.2f} | {over:.3f} | {peaks[name] / 1e6:.0f} |", flush=True)
    heights = {name: found["over"] for name, found in figures.items()}
    publish(
        "device_wait",
        {"options": {k: str(v) for k, v in vars(options).items()}, "rows": figures},
        {"token to token": bars(heights, "over the device's time")},
    )


def main() -> None:
    """Measure the built-in model, or one of a real model's shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=("builtin", *SHAPES), default="builtin")
    parser.add_argument("--path", type=Path, help="checkpoint to measure instead of --model")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{about()}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path, tokens = checkpoint_dir(), list(range(300, 400))
        if options.path is not None:
            path = options.path
        elif options.model != "builtin":
            path = Path(folder) / "model"
            tokens = write_dialled_model(path, SHAPES[options.model])
        prompt = tuple(tokens[i % len(tokens)] for i in range(options.prompt))
        asyncio.run(measure(options, path, prompt))


if __name__ == "__main__":
    main()
