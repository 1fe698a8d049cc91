"""The load of the next model beside the plan in force, whose model serves meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.cluster.plan_start import LoadState, PlanStart
from coordinator.planning.capacity import Capacity


@dataclass(frozen=True)
class LoadAhead:
    """The load of one model. The present model must keep to `room` until the load has ended.

    `next_room` is the capacity of the next plan once it serves.
    """

    start: PlanStart
    room: Capacity
    next_room: Capacity

    @property
    def loads(self) -> LoadState:
        """The progress of the workers."""
        return self.start.loads

    async def run(self) -> None:
        """Load all stages. Raises StartError; a worker that has loaded its stage keeps it for the next Load."""
        await self.start.load_stages(self.next_room, ahead=True)
