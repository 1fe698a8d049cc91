"""The preparation of the next plan: its new workers load their stages while the plan in force serves."""

from __future__ import annotations

import logging

from coordinator.cluster.events import PlanPrepared, PreparationFailed
from coordinator.cluster.plan_start import PlanStart, StartError
from coordinator.cluster.served import ServedModel
from coordinator.cluster.view import View
from coordinator.planning.plan import Plan
from coordinator.workers.this_machine import on_this_machine
from proto.errors import ClusterError

log = logging.getLogger(__name__)


def workers_in_use(view: View, plan: Plan) -> frozenset[str]:
    """Return the addresses of `plan` whose memory is in use, so that they load when the plan in force has ended.

    These are the workers of the plan in force. While this process serves alone, they are those on this machine.
    """
    if view.serving:
        return frozenset(view.serving)
    return frozenset(stage.node for stage in plan.stages if on_this_machine(stage.node))


class Preparation:
    """One preparation of `start` for a plan over `workers`, by id. The workers at the addresses `busy` fetch only."""

    def __init__(
        self,
        start: PlanStart,
        model: ServedModel,
        workers: frozenset[str],
        busy: frozenset[str],
    ) -> None:
        self._start = start
        self._model = model
        self._workers = workers
        self._busy = busy

    async def run(self) -> PlanPrepared | PreparationFailed:
        """Load and fetch, and return what happened. The load of a worker that makes no progress ends as an error."""
        try:
            room = self._model.capacity(self._start.plan)
            await self._start.prepare_stages(room, self._busy)
        except ClusterError as error:
            suspect = error.suspect if isinstance(error, StartError) else None
            log.warning("the plan stays: the next one could not load", extra={"error": str(error)})
            return PreparationFailed(self._workers, str(error), suspect)
        except Exception as error:  # a bug: the next plan must not be prepared forever
            log.exception("the next plan could not be prepared")
            return PreparationFailed(self._workers, f"{type(error).__name__}: {error}")
        return PlanPrepared(self._workers)
