"""The surroundings of a chaos run: a network with faults, hosts with limits, and the places of the processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.faults import HOST_KINDS, NETWORK_KINDS
from tests.chaos.host import Host, hosts
from tests.chaos.network import Network, network
from tests.support.processes.team import Place


@dataclass(frozen=True)
class Surroundings:
    """A network if any fault needs one, hosts if any fault needs them, and the places of the workers."""

    network: Network | None = None
    hosts: list[Host] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    @property
    def coordinator(self) -> Place:
        """The place of the coordinator."""
        flags = ("--insecure",) if self.network is not None else ()
        host = self.hosts[-1].place if self.hosts else Place()
        return Place(flags=flags, prefix=host.prefix, env=host.env)


@contextmanager
def surroundings(
    folder: Path, workers: int, kinds: Sequence[str], seed: int
) -> Iterator[Surroundings]:
    """Run what faults of these kinds need, and nothing else."""
    with ExitStack() as stack:
        net = found = None
        if any(kind in NETWORK_KINDS for kind in kinds):
            net = stack.enter_context(network(workers, seed))
        if any(kind in HOST_KINDS for kind in kinds):
            found = stack.enter_context(hosts(folder, workers + 1))
        places = []
        for number in range(workers):
            place = found[number].place if found else Place()
            if net is not None:
                place = Place(
                    net.address(number),
                    ("--insecure",),
                    (*net.prefix(number), *place.prefix),
                    place.env,
                )
            places.append(place)
        yield Surroundings(net, found or [], places)
