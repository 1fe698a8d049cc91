"""What to do about the cluster as it is: serve over these workers, serve alone, give up, or wait. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.cluster.view import Member, MemberState, Phase, View
from coordinator.plan import Plan
from proto.errors import ClusterError, MemoryLimitError

Planner = Callable[[Sequence[Member], int], Plan]
"""Members and an epoch → their plan; its stages name members by address. Raises ClusterError when there is none."""


@dataclass(frozen=True)
class Serve:
    """Load and connect this plan."""

    plan: Plan


@dataclass(frozen=True)
class ServeAlone:
    """Run all stages in this process."""

    epoch: int


@dataclass(frozen=True)
class GiveUp:
    """Nothing can serve, and the wait is over."""

    reason: str


Action = Serve | ServeAlone | GiveUp


def decide(view: View, planner: Planner) -> Action | None:
    """The next action, or None to go on as it is."""
    match view.phase:
        case Phase.GATHERING:
            return _first_plan(view, planner)
        case Phase.SERVING:
            return _better_plan(view, planner)
        case _:
            return None


def _first_plan(view: View, planner: Planner) -> Action | None:
    """A plan as soon as enough workers are there, or those there are can do it and there is reason not to wait."""
    usable = view.usable()
    limit = view.settings.recovery_wait if view.recovering else view.settings.wait
    over = view.waited >= limit
    enough = len(usable) >= (view.settings.nodes or 1)
    waits_for_more = view.settings.nodes is None and not view.recovering
    problem = view.problem
    if usable and (over or (enough and not waits_for_more) or view.recovering):
        try:
            return Serve(planner(usable, view.epoch + 1))
        except ClusterError as error:
            problem = str(error)
            if over and not (view.settings.local and isinstance(error, MemoryLimitError)):
                return GiveUp(problem)
    if not over:
        return None
    if view.settings.local:
        return ServeAlone(view.epoch + 1)
    return GiveUp(_why(view, problem))


def _better_plan(view: View, planner: Planner) -> Action | None:
    """A new plan when a worker of this one wants to leave, or when someone asked for it."""
    leaving = any(
        view.members[a].state is MemberState.DRAINING for a in view.serving if a in view.members
    )
    if not leaving and not view.replan:
        return None
    usable = view.usable()
    try:
        if usable:
            return Serve(planner(usable, view.epoch + 1))
    except ClusterError:
        pass  # those that stay cannot do it: the one that leaves serves until it is gone
    return ServeAlone(view.epoch + 1) if leaving and view.settings.local else None


def _why(view: View, problem: str) -> str:
    refused = [
        f"{m.name} at {m.address}: {m.reason}"
        for m in view.members.values()
        if m.state is MemberState.REFUSED
    ]
    reasons = "; ".join(filter(None, [problem, *refused])) or "no worker was found"
    return f"no plan can serve after {view.waited:.0f} s: {reasons}"
