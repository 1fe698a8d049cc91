"""Progress under constant failures in virtual time, with and without backups of sequences.

A simulated plan fails every few seconds, and the next one serves after a pause for detection and loading. Clients
repeat questions under the real scheduler and loop. The machine has no influence on the figures: a stage takes the times
of the options. `python -m tests.chaos.storm` measures the same with real processes and faults.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.generation.limits import Limits
from coordinator.generation.loop import GenerationLoop
from coordinator.generation.request import Finished, GenerationRequest, TokenChunk
from coordinator.generation.scheduler import Scheduler
from coordinator.pipeline.base import Pipeline
from coordinator.planning.capacity import Capacity
from mtp.depth.controller import Controller, MtpMode
from proto.backup import LayerState
from proto.errors import WorkerLostError
from proto.frame import Frame
from proto.params import SamplingParams
from tests.chaos.pauses import spread
from tests.support.protocol.simulation import ROOM, SimulatedPipeline, Timing, run_virtually
from tests.support.stages.fake_last_stage import FakeLastStage, plain

CLIENTS = 8


@dataclass(frozen=True)
class PromptTiming(Timing):
    """The times of a pipeline whose prompt tokens take `token` seconds each in every stage."""

    token: float = 0.0

    def of(self, frame: Frame, stage: int) -> float:
        """Return the seconds of a frame in a stage."""
        rows = sum(s.width for s in frame.segments if not s.open)
        return super().of(frame, stage) + rows * self.token


@dataclass
class BackedPipeline(SimulatedPipeline):
    """A simulated pipeline whose stages transfer backups, each in `transfer` seconds."""

    makes_backups: bool = True
    transfer: float = 0.05

    async def read_backup(self, seq_id: int, limit: int) -> tuple[int, list[LayerState]]:
        """Return the newest backup of a sequence."""
        assert self.last.backup is not None
        made, tokens, state = self.last.backup
        assert made == seq_id
        await asyncio.sleep(self.transfer)
        return tokens, [state]

    async def write_backup(
        self, seq_id: int, tokens: Sequence[int], states: Sequence[LayerState]
    ) -> None:
        """Keep a backup until the sequence is admitted."""
        await asyncio.sleep(self.transfer)
        self.last.receive_backup(seq_id, states)


@dataclass
class FailingSource:
    """A source whose pipelines fail `every` seconds. The next one is ready `down` seconds after a failure."""

    timing: Timing
    every: float
    down: float
    backups: bool
    room: Capacity = ROOM
    epoch: int = 0
    present: SimulatedPipeline | None = None

    async def fail_often(self) -> None:
        """Fail the present pipeline again and again."""
        while True:
            await asyncio.sleep(self.every)
            if self.present is not None:
                self.present.fail(WorkerLostError("a fault"))

    async def acquire(self) -> Pipeline:
        """Return the next pipeline."""
        if self.epoch:
            await asyncio.sleep(self.down)
        self.epoch += 1
        last = FakeLastStage(self.epoch)
        self.present = BackedPipeline(
            self.timing, last, self.epoch, self.room, makes_backups=self.backups
        )
        return self.present

    def report_failure(self, pipeline: Pipeline, error: Exception) -> None:
        """Forget the failed pipeline."""
        self.present = None


@dataclass
class Measured:
    """The tokens and silences of all clients."""

    tokens: int = 0
    finished: int = 0
    wrong: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds to the first token of each answer."""
    silences: list[float] = field(default_factory=list)
    """Seconds of the longest silence of each answer after its first token."""


async def ask_often(loop: GenerationLoop, number: int, measured: Measured) -> None:
    """Send one request after the other, and compare every answer."""
    chance, clock = random.Random(number), asyncio.get_running_loop().time
    while True:
        prompt = tuple(chance.randrange(40) for _ in range(chance.choice((150, 400, 800, 1500))))
        count, seed = chance.choice((100, 150, 200, 250)), chance.randrange(9)
        request = GenerationRequest(prompt, count, SamplingParams(seed=seed))
        tokens: list[int] = []
        newest, longest = clock(), 0.0
        async for event in loop.generate(request):
            if isinstance(event, TokenChunk):
                if tokens:
                    longest = max(longest, clock() - newest)
                else:
                    measured.first.append(clock() - newest)
                newest = clock()
                tokens += event.tokens
                measured.tokens += len(event.tokens)
            elif isinstance(event, Finished):
                measured.silences.append(max(longest, clock() - newest))
                measured.finished += event.reason == "length"
                measured.wrong += event.reason != "length" or tokens != plain(prompt, count, seed)


async def measure(
    timing: Timing, seconds: float, every: float, down: float, backups: bool
) -> Measured:
    """Return what clients receive in `seconds`."""
    source = FailingSource(timing, every, down, backups)
    scheduler = Scheduler(Limits(context=4096), Controller(MtpMode(2)))
    loop = GenerationLoop(source, scheduler, asyncio.get_running_loop().time)
    await loop.start()
    measured = Measured()
    tasks = [asyncio.create_task(source.fail_often())]
    tasks += [asyncio.create_task(ask_often(loop, i, measured)) for i in range(CLIENTS)]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await loop.close()
    return measured


def main() -> None:
    """Print a table: undisturbed, and under failures without and with backups."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds from failure to failure")
    parser.add_argument("--down", type=float, default=4.0, help="seconds without a plan after each")
    parser.add_argument("--stage-ms", type=float, default=20.0, help="a window in a stage")
    parser.add_argument("--token-ms", type=float, default=2.5, help="a prompt token in a stage")
    given = parser.parse_args()
    timing = PromptTiming(3, given.stage_ms / 1e3, row=0.002, token=given.token_ms / 1e3)
    logging.disable()
    calm = 0.0
    for name, every, backups in (
        ("undisturbed", 2 * given.seconds, False),
        ("without backups", given.every, False),
        ("with backups", given.every, True),
    ):
        found = run_virtually(measure(timing, given.seconds, every, given.down, backups))
        rate = found.tokens / given.seconds
        calm = calm or rate
        median, most, longest = spread(found.silences)
        first = spread(found.first)
        print(
            f"{name:16} {rate:6.1f} tokens/s, {rate / calm:4.0%}; {found.finished} answers, {found.wrong} wrong;"
            f" silence median {median:.1f}, 95 % {most:.1f}, most {longest:.1f} s;"
            f" first token median {first[0]:.1f}, most {first[2]:.1f} s"
        )


if __name__ == "__main__":
    main()
