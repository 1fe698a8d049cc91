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
from dataclasses import dataclass, field, replace

from coordinator.generation.backup import MAX_PREFIXES
from coordinator.generation.limits import Limits
from coordinator.generation.loop import GenerationLoop
from coordinator.generation.request import Finished, GenerationRequest, TokenChunk
from coordinator.generation.scheduler import Scheduler
from coordinator.pipeline.base import Pipeline
from coordinator.planning.capacity import Capacity
from mtp.depth.controller import Controller, MtpMode
from proto.backup import LayerState, ReceivedStates
from proto.errors import NotReadyError, WorkerLostError
from proto.params import SamplingParams
from tests.chaos.pauses import spread
from tests.support.protocol.simulation import ROOM, SimulatedPipeline, Timing, run_virtually
from tests.support.stages.fake_last_stage import FakeLastStage, plain

CLIENTS = 8

TRANSFER = 0.05
"""Seconds of the transfer of a backup, besides its wait for the engine."""

PREFIXES = replace(ROOM, prefix_bytes=2**20, token_bytes=1)
"""The room of a plan that also keeps the prefix entries of all prompts."""

PROMPTS = tuple(
    tuple(random.Random(i).randrange(40) for _ in range(length))
    for i, length in enumerate((150, 400, 800, 150, 1000, 500, 1500, 200, 600, 1200, 300, 900))
)
"""The prompts that all clients repeat. `tests.chaos.storm` has as many."""


@dataclass
class BackedPipeline(SimulatedPipeline):
    """A simulated pipeline whose stages transfer backups, each in `transfer` seconds."""

    makes_backups: bool = True
    transfer: float = TRANSFER

    async def read_backup(self, seq_id: int, limit: int) -> ReceivedStates:
        """Return the newest backup of a sequence."""
        if seq_id not in self.last.backups:
            raise NotReadyError("the sequence has ended")
        tokens, state = self.last.backups.pop(seq_id)
        await asyncio.sleep(self.transfer)
        return ReceivedStates(tokens, [state], TRANSFER)

    async def write_backup(
        self, seq_id: int, tokens: Sequence[int], states: Sequence[LayerState]
    ) -> None:
        """Keep a backup until the sequence is admitted."""
        await asyncio.sleep(TRANSFER)
        self.last.receive_backup(seq_id, states)


@dataclass
class FailingSource:
    """A source whose pipelines fail `every` seconds. The next one is ready `down` seconds after a failure."""

    timing: Timing
    every: float
    down: float
    backups: bool
    room: Capacity = ROOM
    transfer: float = TRANSFER
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
            self.timing,
            last,
            self.epoch,
            self.room,
            makes_backups=self.backups,
            transfer=self.transfer,
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


async def ask_often(loop: GenerationLoop, number: int, measured: Measured, *, fresh: bool) -> None:
    """Send one request after the other, and compare every answer. With `fresh` no prompt repeats."""
    chance, clock = random.Random(number), asyncio.get_running_loop().time
    while True:
        prompt, count, seed = (
            chance.choice(PROMPTS),
            chance.choice((100, 150, 200, 250)),
            chance.randrange(9),
        )
        if fresh:
            prompt = tuple(chance.randrange(40) for _ in prompt)
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


@dataclass(frozen=True)
class Case:
    """A run: its name, the seconds between failures, and what the coordinator backs up."""

    name: str
    every: float
    answers: bool = False
    prompts: bool = False
    slow_transfer: bool = False
    """A backup waits for a frame before each of 8 layers, as it did before engines read it in one piece."""


async def measure(
    timing: Timing, seconds: float, down: float, case: Case, *, fresh: bool
) -> Measured:
    """Return what clients receive in `seconds`."""
    frame = timing.stage + 128 * timing.token
    transfer = TRANSFER + frame * (8 if case.slow_transfer else 1)
    source = FailingSource(timing, case.every, down, case.answers, PREFIXES, transfer)
    scheduler = Scheduler(Limits(context=4096), Controller(MtpMode(2)))
    scheduler.backups.prefixes.most = MAX_PREFIXES if case.prompts else 0
    loop = GenerationLoop(source, scheduler, asyncio.get_running_loop().time)
    await loop.start()
    measured = Measured()
    tasks = [asyncio.create_task(source.fail_often())]
    tasks += [
        asyncio.create_task(ask_often(loop, i, measured, fresh=fresh)) for i in range(CLIENTS)
    ]
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
    """Print a table: undisturbed, and under failures with more and more backups."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds from failure to failure")
    parser.add_argument("--down", type=float, default=4.0, help="seconds without a plan after each")
    parser.add_argument("--stage-ms", type=float, default=20.0, help="a window in a stage")
    parser.add_argument("--token-ms", type=float, default=2.5, help="a prompt token in a stage")
    parser.add_argument("--fresh", action="store_true", help="no prompt repeats")
    given = parser.parse_args()
    timing = Timing(3, given.stage_ms / 1e3, row=0.002, token=given.token_ms / 1e3)
    logging.disable()
    calm = 0.0
    for case in (
        Case("undisturbed", 2 * given.seconds),
        Case("no backups", given.every),
        Case("slow backups", given.every, answers=True, slow_transfer=True),
        Case("of answers", given.every, answers=True),
        Case("and of prompts", given.every, answers=True, prompts=True),
    ):
        found = run_virtually(measure(timing, given.seconds, given.down, case, fresh=given.fresh))
        rate = found.tokens / given.seconds
        calm = calm or rate
        median, most, longest = spread(found.silences)
        first = spread(found.first)
        print(
            f"{case.name:16} {rate:6.1f} tokens/s, {rate / calm:4.0%}; {found.finished} answers, {found.wrong} wrong;"
            f" silence median {median:.1f}, 95 % {most:.1f}, most {longest:.1f} s;"
            f" first token median {first[0]:.1f}, most {first[2]:.1f} s"
        )


if __name__ == "__main__":
    main()
