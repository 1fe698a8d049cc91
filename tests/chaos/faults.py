"""The faults of a chaos run: their schedule, their injection and their repair."""

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
"""Number of the worker whose process is never ended, unless it is the only one.

The run compares its resource use from start to end.
"""

COORDINATOR = -1


@dataclass(frozen=True)
class Fault:
    """A fault of kind `kind` on worker number `victim`, for `seconds`.

    `opener` limits a connection fault to the connections that one process opened: a worker's number or COORDINATOR.
    None affects all connections.
    """

    kind: str
    victim: int
    seconds: float
    opener: int | None = None


def schedule(seed: int, count: int, workers: int, seconds: tuple[float, float]) -> list[Fault]:
    """Return the `count` faults of a run, each `seconds[0]` to `seconds[1]` long. The same seed gives the same faults.

    The kinds come in a random order, each equally often in a long run. A fault may hit a worker that no plan uses.
    """
    chance = random.Random(seed)
    kinds = [*KINDS] * -(-count // len(KINDS))
    chance.shuffle(kinds)
    return [_fault(kind, workers, seconds, chance) for kind in kinds[:count]]


def _fault(kind: str, workers: int, seconds: tuple[float, float], chance: random.Random) -> Fault:
    ends = kind in ("kill", "restart")
    spared = ends and workers > 1
    victim = chance.choice([n for n in range(workers) if not (spared and n == SURVIVOR)])
    opener = None
    if kind in ("cut", "freeze"):
        others = [n for n in range(workers) if n != victim]
        opener = chance.choice([None, COORDINATOR, *([chance.choice(others)] if others else [])])
    return Fault(kind, victim, chance.uniform(*seconds), opener)


class Faults:
    """Fault injection into one worker of a team at a time. `coordinator` is the process id of the coordinator."""

    def __init__(self, team: Team, model: str, coordinator: int) -> None:
        self.team, self.model, self.coordinator = team, model, coordinator

    def inject(self, fault: Fault) -> None:
        """Start `fault`."""
        number = fault.victim
        {
            "kill": self.team.workers[number].kill,
            "stop": lambda: self.team.pause(number),
            "cut": lambda: self.team.proxies[number].cut(self._opener(fault)),
            "freeze": lambda: self.team.proxies[number].freeze(self._opener(fault)),
            "stuck": lambda: self.team.set_fault(number, "stuck"),
            "restart": lambda: self.team.workers[number].popen.send_signal(signal.SIGTERM),
        }[fault.kind]()

    def _opener(self, fault: Fault) -> int | None:
        if fault.opener is None:
            return None
        if fault.opener == COORDINATOR:
            return self.coordinator
        return self.team.workers[fault.opener].pid

    def repair(self, fault: Fault) -> None:
        """End `fault`. A worker whose process ended is started again."""
        if fault.kind in ("kill", "restart"):
            self.team.workers[fault.victim].wait()
            launched = self.team.launch_again(fault.victim, self.model)
            self.team.workers[fault.victim] = as_worker(launched)
        self.team.end_faults()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until `condition` is true. Return False if it is not true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
