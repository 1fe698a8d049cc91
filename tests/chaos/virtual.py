"""Thousands of faults in virtual time, under the real loop, scheduler, frames and engines with a text by formula.

Clients repeat questions while plans fail, change and are restored, and coordinators end and begin again. Every token
and log-probability is compared with the undisturbed answer. `python -m tests.chaos.virtual --faults 10000` starts a
run; equal seeds give the same run. Planning, processes and sockets take no part: `tests.chaos.run` covers these.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.drafts.prompt_lookup import NgramMode
from coordinator.pipeline.pipeline import Pipeline
from coordinator.planning.capacity import Capacity
from coordinator.schedule.admission import Limits
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.request import (
    Finished,
    GenerationEvent,
    GenerationRequest,
    TokenChunk,
    generate,
)
from coordinator.schedule.scheduler import Scheduler
from proto.errors import StaleEpochError, WorkerLostError
from proto.frame import Evict
from proto.params import SamplingParams
from proto.span import Span
from tests.chaos.engine_plan import EnginePlan
from tests.support.protocol.simulation import run_virtually
from tests.support.stages.token_stages import Formula, TokenStage, token_engine
from worker.engine.frame_engine import FrameEngine
from worker.engine.stage_state import Budget

CUTS: tuple[tuple[int, ...], ...] = ((), (4,), (3,), (2, 5), (1, 6), (2, 4, 6))
"""The plans: the layers before which a model of eight is cut."""

LAYERS = 8

CAPACITY = Capacity(sequences=3, kv_tokens=2048, prefix_bytes=2**24, token_bytes=8192, state_bytes=2**18)
"""Room for fewer sequences than clients, so that some wait."""

BUDGET = Budget(CAPACITY.sequences, CAPACITY.kv_tokens, CAPACITY.prefix_bytes)

CLIENTS = 4
MODES = ("off", "auto", "1", "3", "filled")
"""The values of --mtp. Each coordinator has one, and all give the same tokens."""

GAP_SECONDS = (0.02, 0.1, 0.3, 0.6)
"""Virtual seconds. Upper bounds of the times from a serving plan to its fault: during restore, prompts or answers."""

MAX_FRUITLESS = 2
"""Plans in a row that fail before a frame returns. After 4 of them the loop ends the requests, as it should."""

DOWN_SECONDS = 0.5
"""Virtual seconds. Longest time from the end of a plan to the next one."""

HUNG_SECONDS = 90.0
"""Virtual seconds. Silence after which a client is reported as hung."""

MOST_WRONG = 20
"""Wrong answers after which a run ends, because the rest would be the same."""

LEAVE_SHARE = 0.08
"""Share of the answers whose client leaves early."""

RESTART = "the coordinator ends"

QUESTIONS = tuple(
    (
        12 + 9 * (i % 5),
        SamplingParams(0.8 if i % 2 else 0.0, seed=i, logprobs=(2, None, None)[i % 3]),
    )
    for i in range(15)
)
"""The tokens and the sampling of each question. Question i has prompt i of the model, modulo their number."""

FAULTS: dict[str, Callable[[EnginePlan, random.Random], None]] = {
    "cut": lambda plan, _: plan.fail(WorkerLostError("a connection ended")),
    "stop": lambda plan, chance: plan.stop_stage(chance.randrange(plan.stages)),
    "hop": lambda plan, chance: plan.cut_hop(chance.randrange(plan.stages + 1)),
    "engine": lambda plan, chance: plan.break_engine(chance.randrange(plan.stages)),
    "replaced": lambda plan, _: plan.fail(StaleEpochError("another plan begins")),
    "twice": lambda plan, chance: plan.damage_frame(chance.randrange(plan.stages + 1), lambda data: [data, data]),
    "truncated": lambda plan, chance: plan.damage_frame(
        chance.randrange(plan.stages + 1), lambda data: [data[: len(data) // 2]]
    ),
    "pause": lambda plan, chance: plan.pause(chance.uniform(0.1, 1.5)),
    "deaf": lambda plan, chance: plan.deafen(chance.randrange(plan.stages)),
    "backup": lambda plan, _: plan.break_backup(),
}
"""Faults of a plan, by kind. The last three do not end it."""

GENTLE = ("pause", "deaf", "backup")
"""Faults that do not end a plan."""

COORDINATOR_SHARE = 0.03
"""Share of the faults that end the coordinator. Its answers continue in the next one, as from the journal."""


@dataclass
class Answer:
    """The tokens and log-probabilities that one client has received."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Result:
    """The counts of a run."""

    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest: float = 0.0
    """Virtual seconds. The longest silence between two tokens of an answer."""


PROMPTS = [tuple(range(i, i + length)) for i, length in enumerate((9, 9, 17, 30, 47))]


def make_engines(cuts: Sequence[int], epoch: int) -> list[FrameEngine]:
    """Return the engines of a new plan over layers that hold tokens, with a text by formula."""
    borders = (0, *cuts, LAYERS)
    return [
        token_engine(
            TokenStage(span=Span(start, end)),
            epoch,
            Formula() if end == LAYERS else None,
            first=start == 0,
            budget=BUDGET,
        )
        for start, end in itertools.pairwise(borders)
    ]


class Plans:
    """The source of plans. Each has other cuts and a new epoch."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.epoch = 0
        self.fruitless = 0
        """Plans in a row that failed before a frame returned."""
        self.counts = Counter[str]()
        self.present: EnginePlan | None = None
        self.began = asyncio.Event()
        self._old_frames: list[bytes] = []

    async def acquire(self) -> Pipeline:
        """Return the next plan after a pause."""
        await asyncio.sleep(self.chance.uniform(0, DOWN_SECONDS) if self.epoch else 0.0)
        self.epoch += 1
        engines = make_engines(self.chance.choice(CUTS), self.epoch)
        plan = EnginePlan(engines, CAPACITY, self.chance, self.counts)
        self.counts["plans"] += 1
        self.counts["plans of several stages"] += len(engines) > 1
        plan.refuse_stale(self._old_frames)
        self.present = plan
        self.began.set()
        return plan

    def report_failure(self, pipeline: Pipeline, error: Exception) -> None:
        """Forget the failed plan, and keep some of its frames."""
        assert isinstance(pipeline, EnginePlan)
        self.fruitless = 0 if pipeline.returned else self.fruitless + 1
        self._old_frames = pipeline.sent or self._old_frames
        self.present = None
        self.began.clear()


class Study:
    """Clients, faults and coordinators of one run."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.plans = Plans(self.chance)
        self.result = Result()
        self.wanted: dict[int, Answer] = {}
        self.prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(QUESTIONS))]
        self.loop: GenerationLoop
        self.ready = asyncio.Event()
        self.spoiled = asyncio.Event()
        """Set after MOST_WRONG wrong answers, which end the run."""
        self.ending = False
        loop = asyncio.get_running_loop()
        self.clock = loop.time
        loop.set_exception_handler(self._record_error)

    def _record_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count an exception that no task expected, such as an assertion of a stage."""
        self._record_wrong(f"{context['message']}: {context.get('exception')!r}")
        loop.default_exception_handler(context)

    async def start_coordinator(self) -> None:
        """Begin a coordinator with one of the modes."""
        scheduler = Scheduler(
            Limits(context=1024, prefill_chunk=16, step_tokens=32),
            Controller(MtpMode.parse(self.chance.choice(MODES)), ngram=self.chance.choice(tuple(NgramMode))),
        )
        self.loop = GenerationLoop(self.plans, scheduler, self.clock)
        await self.loop.start()
        self.ready.set()

    async def restart_coordinator(self) -> None:
        """End the coordinator with open answers, and begin another."""
        self.ready.clear()
        await self.loop.close(RESTART)
        self.plans.began.clear()
        await asyncio.sleep(self.chance.uniform(0.0, DOWN_SECONDS))
        await self.start_coordinator()

    # ---- clients

    async def ask(self, number: int, leave_after: int | None = None) -> Answer | None:
        """Return an answer, over as many coordinators as it takes, or None if it failed."""
        count, params = QUESTIONS[number]
        answer = Answer()
        while True:
            await self.ready.wait()
            # The journal may lack the newest tokens, and keeps no log-probabilities.
            kept = 0 if params.logprobs else self.chance.randint(0, len(answer.tokens))
            request = GenerationRequest(self.prompts[number], count, params, emitted=tuple(answer.tokens[:kept]))
            before = Answer(answer.tokens[kept:], list(answer.logprobs))
            del answer.tokens[kept:]
            answer.logprobs.clear()
            error = await self._receive(request, answer, leave_after)
            again = answer.tokens[kept:]
            shared = min(len(again), len(before.tokens))
            if again[:shared] != before.tokens[:shared]:
                self._record_failure(number, "other tokens after a restart", answer)
                return None
            if len(before.tokens) > len(again):  # the client has them from the coordinator before
                answer.tokens[kept:] = before.tokens
            if error is None:
                return answer
            if error != RESTART:
                self._record_failure(number, error, answer)
                return None

    async def _receive(self, request: GenerationRequest, answer: Answer, leave_after: int | None) -> str | None:
        """Append what one coordinator sends. Return the error, or None at the end."""
        newest = self.clock()
        events = cast(AsyncGenerator[GenerationEvent], generate(self.loop, request))
        try:
            while True:
                async with asyncio.timeout(HUNG_SECONDS):
                    event = await anext(events)
                if isinstance(event, Finished):
                    return None if event.reason == "length" else event.error or event.reason
                if isinstance(event, TokenChunk):
                    self.result.longest = max(self.result.longest, self.clock() - newest)
                    newest = self.clock()
                    answer.tokens += event.tokens
                    answer.logprobs += [entry.logprob for entry in event.logprobs]
                    if leave_after is not None and len(answer.tokens) >= leave_after:
                        return None
        except TimeoutError:
            self.result.counts["hung"] += 1
            return "hung"
        finally:
            await events.aclose()

    def _record_failure(self, number: int, what: str, answer: Answer) -> None:
        self.result.counts["failed"] += 1
        self._record_wrong(f"question {number}: {what} after {len(answer.tokens)} tokens")

    def _record_wrong(self, text: str) -> None:
        self.result.wrong.append(text)
        if len(self.result.wrong) >= MOST_WRONG:
            self.spoiled.set()

    async def be_client(self) -> None:
        """Ask one question after the other until the run ends."""
        while not self.ending:
            number = self.chance.randrange(len(QUESTIONS))
            leaves = self.chance.random() < LEAVE_SHARE
            after = self.chance.randint(1, QUESTIONS[number][0]) if leaves else None
            if (answer := await self.ask(number, after)) is not None:
                self.compare(number, answer, left=leaves)

    def compare(self, number: int, answer: Answer, *, left: bool) -> None:
        """Compare an answer with the undisturbed one, bit by bit."""
        wanted, counts = self.wanted[number], self.result.counts
        length = len(answer.tokens)
        counts["left" if left else "finished"] += 1
        counts["tokens"] += length
        counts["log-probabilities"] += len(answer.logprobs)
        if not left:
            counts["lost"] += max(0, len(wanted.tokens) - length)
            counts["doubled"] += max(0, length - len(wanted.tokens))
        same = answer.tokens == wanted.tokens[:length]
        if not same or answer.logprobs != wanted.logprobs[: len(answer.logprobs)]:
            counts["different"] += 1
            self._record_wrong(f"question {number}: {answer} instead of {wanted}")

    # ---- faults

    async def inject(self, count: int) -> None:
        """Inject `count` faults. A fault that ends a plan is the last one of this plan."""
        kinds, shown, began = [*FAULTS], 0, time.monotonic()
        while (done := sum(self.result.faults.values())) < count:
            if done >= shown + 500:
                shown = done
                minutes = (time.monotonic() - began) / 60
                print(
                    f"{done} faults in {minutes:.1f} minutes, {dict(self.result.counts)}",
                    file=sys.stderr,
                )
            await self.plans.began.wait()
            await asyncio.sleep(self.chance.uniform(0.0, self.chance.choice(GAP_SECONDS)))
            if self.chance.random() < COORDINATOR_SHARE:
                self.result.faults["coordinator"] += 1
                await self.restart_coordinator()
                continue
            plan = self.plans.present
            if plan is None or plan.failed:
                continue
            if self.plans.fruitless >= MAX_FRUITLESS:
                await plan.proven.wait()
            if plan.failed:
                continue
            kind = self.chance.choice(kinds)
            FAULTS[kind](plan, self.chance)
            self.result.faults[kind] += 1
            if kind not in GENTLE:
                await plan.ended.wait()

    async def run(self, faults: int) -> Result:
        """Ask everything undisturbed, and then under `faults` faults. Check that nothing is left at the end."""
        await self.start_coordinator()
        for number in range(len(QUESTIONS)):
            answer = await self.ask(number)
            assert answer is not None, self.result.wrong
            self.wanted[number] = answer
        self.result = Result()
        self.plans.counts = self.result.counts
        clients = [asyncio.create_task(self.be_client()) for _ in range(CLIENTS)]
        injecting = asyncio.create_task(self.inject(faults))
        spoiled = asyncio.create_task(self.spoiled.wait())
        await asyncio.wait([injecting, spoiled], return_when=asyncio.FIRST_COMPLETED)
        self.ending = True
        for task in (spoiled, *([injecting, *clients] if self.spoiled.is_set() else [])):
            task.cancel()
        ended = await asyncio.gather(injecting, *clients, return_exceptions=True)
        self.result.wrong += [repr(one) for one in ended if isinstance(one, Exception)]
        if self.spoiled.is_set():
            return self.result
        await asyncio.sleep(HUNG_SECONDS)
        self.check_rest()
        await self.loop.close()
        return self.result

    def check_rest(self) -> None:
        """Assert that no stage and no scheduler holds a sequence without a client."""
        scheduler, plan = self.loop.scheduler, self.plans.present
        assert plan is not None
        scheduler.check()
        assert not scheduler.running and not scheduler.waiting and not scheduler.in_flight
        evicted = {op.seq_id for op in scheduler.ops if isinstance(op, Evict)}
        for engine in plan.engines:
            assert engine.sequences.keys() <= evicted, engine.sequences.keys()


def study_virtually(faults: int, seed: int) -> Result:
    """Run a study in virtual time."""

    async def study() -> Result:
        """Run the study inside the loop."""
        return await Study(seed).run(faults)

    return run_virtually(study())


def main() -> None:
    """Run the study from the command line. Exit with status 1 if an answer was lost, doubled, different or failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    began = time.monotonic()

    result = study_virtually(given.faults, given.seed)
    minutes = (time.monotonic() - began) / 60
    print(f"{sum(result.faults.values())} faults in {minutes:.1f} minutes: {dict(result.faults)}")
    print(f"{dict(result.counts)}; longest silence {result.longest:.1f} virtual seconds")
    print(*result.wrong[:5], sep="\n")
    sys.exit(bool(result.wrong))


if __name__ == "__main__":
    main()
