"""The state of a one-way link between two machines: when each packet arrives, and which packets are lost."""

from __future__ import annotations

import random
from dataclasses import dataclass

QUEUE_SECONDS = 0.5
"""Seconds. Longest wait of a packet for a link with a rate limit. Routers drop packets at about this length."""


@dataclass(frozen=True)
class Impairment:
    """The faults of a link. Times are in seconds, `rate` in bytes a second, the others are shares of all packets.

    Packets keep their order, except the share `reorder`, which is sent without the delay.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    rate: float = 0.0


class PacketLink:
    """A one-way link with an impairment."""

    def __init__(self, impairment: Impairment, chance: random.Random) -> None:
        self.impairment = impairment
        self._chance = chance
        self._latest = 0.0
        self._free = 0.0

    def arrivals(self, size: int, now: float) -> list[float]:
        """Return the times at which a packet of `size` bytes arrives: none if it is lost, two if it is duplicated."""
        faults, chance = self.impairment, self._chance
        if chance.random() < faults.loss:
            return []
        sent = now
        if faults.rate:
            sent = max(now, self._free)
            if sent - now > QUEUE_SECONDS:
                return []
            sent = self._free = sent + size / faults.rate
        if faults.reorder and chance.random() < faults.reorder:
            return [sent]
        at = max(sent + faults.delay + chance.uniform(0.0, faults.jitter), self._latest)
        self._latest = at
        return [at, at] if faults.duplicate and chance.random() < faults.duplicate else [at]
