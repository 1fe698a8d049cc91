"""The preparation of the next plan: its new workers load their stages while the plan in force serves."""

from __future__ import annotations

import logging
from collections.abc import Collection

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


async def prepare_plan(
    start: PlanStart, model: ServedModel, epoch: int, without: Collection[str]
) -> PlanPrepared | PreparationFailed:
    """Load the stages of `start` beside the plan of `epoch`, except on the workers `without`. Return what happened.

    The load of a worker ends when it makes no progress, so this call ends too.
    """
    try:
        room = model.capacity(start.plan)
        await start.load_stages(room, ahead=True, without=without)
    except ClusterError as error:
        suspect = error.suspect if isinstance(error, StartError) else None
        log.warning("the plan stays: the next one could not load", extra={"error": str(error)})
        return PreparationFailed(epoch, str(error), suspect)
    except Exception as error:  # a bug: the next plan must not be prepared forever
        log.exception("the next plan could not be prepared")
        return PreparationFailed(epoch, f"{type(error).__name__}: {error}")
    return PlanPrepared(epoch)
