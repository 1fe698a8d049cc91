"""The faults of a chaos run: which come, what each does to a worker, and how it is mended."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.processes.processes import as_worker
from tests.support.processes.team import Team

KINDS = ("kill", "stop", "cut", "freeze", "stuck", "restart")

SURVIVOR = 0
"""This worker's process is never ended: what grows in it over the run is seen."""

COORDINATOR = -1


@dataclass(frozen=True)
class Fault:
    """What happens to worker number `victim`, for `seconds`.

    Where connections to it are hurt, `opener` says whose: another worker's, by number, COORDINATOR's, or everyone's.
    """

    kind: str
    victim: int
    seconds: float
    opener: int | None = None


def schedule(seed: int, count: int, workers: int, seconds: tuple[float, float]) -> list[Fault]:
    """All faults of a run, each lasting from `seconds[0]` to `seconds[1]`: the same seed gives the same ones.

    Kinds come in a random order, as often as any other in a long run. A victim need not be in use when its turn comes.
    """
    chance = random.Random(seed)
    kinds = [*KINDS] * -(-count // len(KINDS))
    chance.shuffle(kinds)
    return [_fault(kind, workers, seconds, chance) for kind in kinds[:count]]


def _fault(kind: str, workers: int, seconds: tuple[float, float], chance: random.Random) -> Fault:
    ends = kind in ("kill", "restart")
    victim = chance.choice([n for n in range(workers) if not (ends and n == SURVIVOR)])
    opener = None
    if kind in ("cut", "freeze"):
        other = chance.choice([n for n in range(workers) if n != victim])
        opener = chance.choice([None, COORDINATOR, other])
    return Fault(kind, victim, chance.uniform(*seconds), opener)


class Faults:
    """Hurts one worker of a team at a time. `coordinator` is the process that connects to all of them."""

    def __init__(self, team: Team, model: str, coordinator: int) -> None:
        self.team, self.model, self.coordinator = team, model, coordinator

    def inject(self, fault: Fault) -> None:
        number = fault.victim
        {
            "kill": self.team.workers[number].kill,
            "stop": lambda: self.team.pause(number),
            "cut": lambda: self.team.proxies[number].cut(self._opener(fault)),
            "freeze": lambda: self.team.proxies[number].freeze(self._opener(fault)),
            "stuck": lambda: self.team.tell(number, "stuck"),
            "restart": lambda: self.team.workers[number].popen.send_signal(signal.SIGTERM),
        }[fault.kind]()

    def _opener(self, fault: Fault) -> int | None:
        if fault.opener is None:
            return None
        if fault.opener == COORDINATOR:
            return self.coordinator
        return self.team.workers[fault.opener].pid

    def mend(self, fault: Fault) -> None:
        """All is well again, with another process where one has ended."""
        if fault.kind in ("kill", "restart"):
            self.team.workers[fault.victim].wait()
            launched = self.team.launch_again(fault.victim, self.model)
            self.team.workers[fault.victim] = as_worker(launched)
        self.team.heal()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
