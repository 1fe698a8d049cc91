"""The faults of a chaos run: their schedule, their injection and their repair."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from tests.chaos.host import Host, why_no_limits, why_no_memory_group, why_no_small_disk
from tests.chaos.network import Network, why_no_network
from tests.chaos.packet_link import Impairment
from tests.support.processes.processes import as_worker
from tests.support.processes.team import Team

KINDS = ("kill", "stop", "cut", "freeze", "stuck", "restart")
"""Faults of processes, and of connections through a proxy."""

PROXY_KINDS = ("cut", "freeze")

NETWORK_KINDS = ("delay", "loss", "reorder", "rate", "oneway", "partition", "vanish")
"""Faults of the packets between machines.

`oneway` loses all packets of one direction, and `partition` those of both. `vanish` ends a worker whose connections
stay half open, because no packet of its end arrives.
"""

HOST_KINDS = ("clock", "disk", "descriptors", "memory", "allocations")
"""Faults of a machine's resources. `memory` limits a control group, and `allocations` the address space."""

MEMBER_KINDS = ("end member", "halt member", "kill", "stop", "restart")
"""Faults of groups, by the clock: a worker's process for its group is killed, or stopped and never continued.

No proxy lies before the workers, since it would not lie before these processes.
"""

STUDIES = {
    "process": KINDS,
    "network": NETWORK_KINDS,
    "host": HOST_KINDS,
    "storm": KINDS,
    "group": MEMBER_KINDS,
}
"""The kinds of faults of each study."""

ENDING_KINDS = ("kill", "restart", "vanish", "memory", "allocations")
"""Faults that end a worker's process, or may do so."""

SURVIVOR = 0
"""Number of the worker whose process is never ended, unless it is the only one.

The run compares its resource use from start to end.
"""

COORDINATOR = -1

CLOCK_STEPS = (-(10**8), -3600, -30, 30, 3600, 10**8)
"""Seconds. Steps of a wall clock: three years, the change of a time zone, and a correction."""


@dataclass(frozen=True)
class Fault:
    """A fault of kind `kind` on worker number `victim`, for `seconds`.

    `opener` limits a connection fault to the connections that one process opened, and a network fault to the packets
    that one process exchanges with the victim: a worker's number or COORDINATOR. None affects all. `amount`, from 0 to
    1, chooses how strong a network or host fault is. Host faults may hit the COORDINATOR.
    """

    kind: str
    victim: int
    seconds: float
    opener: int | None = None
    amount: float = 0.0


def why_impossible(kind: str) -> str | None:
    """Return why this system permits no fault of this kind, or None if it does."""
    if kind in NETWORK_KINDS:
        return why_no_network()
    reasons = {
        "disk": why_no_small_disk,
        "allocations": why_no_limits,
        "memory": why_no_memory_group,
    }
    return reasons[kind]() if kind in reasons else None


def schedule(
    seed: int, count: int, workers: int, seconds: tuple[float, float], kinds: Sequence[str] = KINDS
) -> list[Fault]:
    """Return the `count` faults of a run, each `seconds[0]` to `seconds[1]` long. The same seed gives the same faults.

    The kinds come in a random order, each equally often in a long run. A fault may hit a worker that no plan uses.
    """
    chance = random.Random(seed)
    order = [*kinds] * -(-count // len(kinds))
    chance.shuffle(order)
    return [_fault(kind, workers, seconds, chance) for kind in order[:count]]


def _fault(kind: str, workers: int, seconds: tuple[float, float], chance: random.Random) -> Fault:
    spared = kind in ENDING_KINDS and workers > 1
    victims = [n for n in range(workers) if not (spared and n == SURVIVOR)]
    if kind in ("clock", "disk", "descriptors"):
        victims.append(COORDINATOR)
    victim = chance.choice(victims)
    opener = None
    if kind in (*PROXY_KINDS, "oneway", "partition"):
        others = [n for n in range(workers) if n != victim]
        opener = chance.choice([None, COORDINATOR, *([chance.choice(others)] if others else [])])
    length = chance.uniform(*seconds)
    amount = chance.random() if kind in (*NETWORK_KINDS, *HOST_KINDS) else 0.0
    return Fault(kind, victim, length, opener, amount)


class Faults:
    """Fault injection into one process of a team at a time. `coordinator` is the process id of the coordinator.

    Network faults need a `network` whose machines have the workers' numbers. Host faults need `hosts`, one for each
    worker and the last for the coordinator. `address` is the coordinator's, for HTTP.
    """

    def __init__(
        self,
        team: Team,
        model: str,
        coordinator: int,
        *,
        address: str,
        network: Network | None = None,
        hosts: Sequence[Host] = (),
    ) -> None:
        self.team, self.model, self.coordinator, self.address = team, model, coordinator, address
        self.network, self.hosts = network, hosts

    def inject(self, fault: Fault) -> None:
        """Start `fault`."""
        if fault.kind in NETWORK_KINDS:
            self._inject_network(fault)
        elif fault.kind in HOST_KINDS:
            self._inject_host(fault)
        else:
            self._inject_process(fault)

    def _inject_process(self, fault: Fault) -> None:
        number = fault.victim
        {
            "kill": self.team.workers[number].kill,
            "stop": lambda: self.team.pause(number),
            "cut": lambda: self.team.proxies[number].cut(self._opener(fault)),
            "freeze": lambda: self.team.proxies[number].freeze(self._opener(fault)),
            "stuck": lambda: self.team.set_fault(number, "stuck"),
            "restart": lambda: self.team.workers[number].popen.send_signal(signal.SIGTERM),
            "end member": lambda: self._signal_members(number, signal.SIGKILL),
            "halt member": lambda: self._signal_members(number, signal.SIGSTOP),
        }[fault.kind]()

    def _signal_members(self, number: int, sent: signal.Signals) -> None:
        for member in members_of(self.team.workers[number].pid):
            member.send_signal(sent)

    def _opener(self, fault: Fault) -> int | None:
        return None if fault.opener is None else self._pid(fault.opener)

    def _pid(self, number: int) -> int:
        return self.coordinator if number == COORDINATOR else self.team.workers[number].pid

    def _inject_network(self, fault: Fault) -> None:
        assert self.network is not None
        network, victim, amount = self.network, fault.victim, fault.amount
        peer = network.own if fault.opener == COORDINATOR else fault.opener
        match fault.kind:
            case "delay":
                network.impair(victim, Impairment(delay=0.01 + 0.09 * amount, jitter=0.02))
            case "loss":
                network.impair(victim, Impairment(loss=0.02 + 0.08 * amount))
            case "reorder":
                faults = Impairment(delay=0.01, jitter=0.005, reorder=0.4 * amount, duplicate=0.1)
                network.impair(victim, faults)
            case "rate":
                network.impair(victim, Impairment(rate=30_000 + 220_000 * amount))
            case "oneway" if amount < 0.5:
                network.cut(victim, peer)
            case "oneway":
                network.cut(peer, victim)
            case "partition" | "vanish":
                network.cut(victim, peer)
                network.cut(peer, victim)
        if fault.kind == "vanish":
            self.team.workers[victim].kill()

    def _inject_host(self, fault: Fault) -> None:
        host, pid = self.hosts[fault.victim], self._pid(fault.victim)
        match fault.kind:
            case "clock":
                host.move_clock(CLOCK_STEPS[int(fault.amount * len(CLOCK_STEPS))])
            case "disk":
                host.fill_disk()
                if fault.victim not in (COORDINATOR, SURVIVOR) and fault.amount < 0.5:
                    self.team.workers[fault.victim].stop()
                    self._start_again(fault.victim)
            case "descriptors":
                worker = fault.victim != COORDINATOR
                address = self.team.workers[fault.victim].address if worker else self.address
                host.exhaust_descriptors(address)
            case "memory":
                host.limit_memory()
            case "allocations":
                host.limit_address_space(pid)

    def repair(self, fault: Fault) -> None:
        """End `fault`. A worker whose process ended is started again."""
        if self.hosts and fault.kind in HOST_KINDS:
            running = fault.victim == COORDINATOR or self.team.workers[fault.victim].running
            self.hosts[fault.victim].repair(self._pid(fault.victim) if running else None)
        if fault.kind in ("kill", "restart"):
            self.team.workers[fault.victim].wait()
        if fault.victim != COORDINATOR and not self.team.workers[fault.victim].running:
            self._start_again(fault.victim)
        if self.network is not None:
            self.network.mend()
        self.team.end_faults()

    def _start_again(self, number: int) -> None:
        launched = self.team.launch(number, self.model)
        self.team.workers[number] = as_worker(launched)


def members_of(pid: int) -> list[psutil.Process]:
    """Return the processes of the worker `pid` that serve a group. A spare one listens to nothing yet."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if "--member" in child.cmdline() and child.net_connections("tcp"):
                found.append(child)
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until `condition` is true. Return False if it is not true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
