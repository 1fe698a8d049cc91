"""What to do about the cluster as it is: serve over these workers, serve alone, give up, or wait. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.cluster.member import Member, MemberState
from coordinator.cluster.view import Phase, View
from coordinator.planning.plan import Plan
from proto.errors import ClusterError, MemoryLimitError

Planner = Callable[[Sequence[Member], int], Plan]
"""Members and an epoch → their plan; its stages name members by address. Raises ClusterError when there is none."""


@dataclass(frozen=True)
class StartPlan:
    """Load and connect this plan."""

    plan: Plan


@dataclass(frozen=True)
class StartAlone:
    """Run all stages in this process."""

    epoch: int


@dataclass(frozen=True)
class KeepPlan:
    """A new plan was asked for; the one in force stays, and `reason` says why."""

    reason: str


@dataclass(frozen=True)
class GiveUp:
    """Nothing can serve, and the wait is over."""

    reason: str


Action = StartPlan | StartAlone | KeepPlan | GiveUp


def decide(view: View, planner: Planner) -> Action | None:
    """The next action, or None to go on as it is."""
    match view.phase:
        case Phase.GATHERING:
            return _plan_while_gathering(view, planner)
        case Phase.SERVING:
            return _plan_while_serving(view, planner)
        case _:
            return None


def _plan_while_gathering(view: View, planner: Planner) -> Action | None:
    """A plan as soon as there is one and no reason to wait for more; then this process; then the end."""
    settings = view.settings
    usable = view.usable()
    enough = settings.nodes is not None and len(usable) >= settings.nodes
    problem, curable = view.problem, True
    if usable and (view.recovering or enough or view.waited >= settings.wait):
        try:
            plan = planner(usable, view.epoch + 1)
        except ClusterError as error:
            problem = str(error)
            curable = isinstance(error, MemoryLimitError)
        else:
            if view.now >= view.retry_at:
                return StartPlan(plan)
    # At the start, workers whose pinned layers do not fit together are a mistake to be told, not served around.
    if view.waited >= settings.wait and (curable or view.recovering) and _may_serve_alone(view):
        return StartAlone(view.epoch + 1)
    over = view.waited >= (settings.recovery_wait if view.recovering else settings.wait)
    return GiveUp(_failure_reason(view, problem)) if over else None


def _plan_while_serving(view: View, planner: Planner) -> Action | None:
    """A new plan when a worker of this one wants to leave, or when someone asked for it."""
    members = [view.members[address] for address in view.serving]
    leaving = any(member.state is MemberState.DRAINING for member in members)
    if not leaving and not view.replan:
        return None
    reason = "no worker is ready"
    if usable := view.usable():
        try:
            plan = planner(usable, view.epoch + 1)
        except ClusterError as error:
            reason = str(error)
        else:
            if tuple(stage.node for stage in plan.stages) != view.serving:
                return StartPlan(plan)
            reason = "it is the best for the workers there are"
    if leaving and _may_serve_alone(view):
        return StartAlone(view.epoch + 1)
    # Who leaves serves until it is gone: nobody else can.
    return KeepPlan(reason) if view.replan else None


def _may_serve_alone(view: View) -> bool:
    return not (view.settings.why_not_alone or view.alone_problem)


def _failure_reason(view: View, problem: str) -> str:
    """Why there is no plan, for the person who waits for one: the last problem, and each worker's own."""
    workers = [_member_problem(m, view.now) for _, m in sorted(view.members.items())]
    found = [problem, view.settings.why_not_alone, view.alone_problem, *workers]
    reasons = "; ".join(dict.fromkeys(filter(None, found))) or "no worker was found"
    return f"no plan can serve after {view.waited:.0f} s: {reasons}"


def _member_problem(member: Member, now: float) -> str:
    if member.state in (MemberState.LOST, MemberState.REFUSED):
        return f"{member.name} at {member.address}: {member.reason}"
    if member.backoff_until > now:
        return f"{member.name} is held back after {member.failure_count} losses"
    return ""
