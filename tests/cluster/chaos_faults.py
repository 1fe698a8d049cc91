"""The faults of a chaos run: what each does to a worker, and how it is mended."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

from tests.cluster.processes import as_worker
from tests.cluster.team import Team

KINDS = ("kill", "stop", "cut", "freeze", "stuck", "restart")

SURVIVOR = 0
"""This worker's process is never ended: what grows in it over the run is seen."""


class Faults:
    """Hurts one worker of a team at a time. `coordinator` is the process that connects to all of them."""

    def __init__(self, team: Team, model: str, coordinator: int, chance: random.Random) -> None:
        self.team, self.model, self.chance = team, model, chance
        self.coordinator = coordinator

    def choose(self, kind: str, in_use: list[int]) -> int:
        """A victim: mostly one that serves."""
        everyone = list(range(len(self.team.workers)))
        pool = in_use if in_use and self.chance.random() < 0.85 else everyone
        if kind in ("kill", "restart"):
            pool = [n for n in pool if n != SURVIVOR] or [n for n in everyone if n != SURVIVOR]
        return self.chance.choice(pool)

    def inject(self, kind: str, number: int) -> None:
        {
            "kill": self.team.workers[number].kill,
            "stop": lambda: self.team.pause(number),
            "cut": lambda: self.team.proxies[number].cut(self._opener(number)),
            "freeze": lambda: self.team.proxies[number].freeze(self._opener(number)),
            "stuck": lambda: self.team.tell(number, "stuck"),
            "restart": lambda: self.team.workers[number].popen.send_signal(signal.SIGTERM),
        }[kind]()

    def _opener(self, number: int) -> int | None:
        """Whose connections to a worker are hurt: everyone's, the coordinator's, or another worker's."""
        others = [w.pid for i, w in enumerate(self.team.workers) if i != number and w.running]
        return self.chance.choice([None, self.coordinator, self.chance.choice(others)])

    def mend(self, kind: str, number: int) -> None:
        """All is well again, with another process where one has ended."""
        if kind in ("kill", "restart"):
            self.team.workers[number].wait()
            launched = self.team.launch_again(number, self.model)
            self.team.workers[number] = as_worker(launched)
        self.team.heal()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
