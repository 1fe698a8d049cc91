"""The next action for a view of the cluster: start a plan, serve alone, keep the plan, or give up. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.cluster.view import FIRST_BACKOFF, Member, MemberState, Phase, View
from coordinator.planning.plan import EQUAL, LayerGapError, Plan
from proto.errors import ClusterError, MemoryLimitError

Planner = Callable[[Sequence[Member], int], Plan]
"""Function from members and an epoch to a plan whose stages name members by address. Raises ClusterError."""

SETTLE_SECONDS = 2.0
"""Seconds between the last join and an automatic change of plan. Workers started together cause one change."""

POSTPONED_SECONDS = 60.0
"""Seconds. Workers that joined are then used although answers are open, for a server that is never idle."""

JOIN_SECONDS = 300.0
"""Seconds. A worker that joined waits so long for answers whose states no backup can hold."""

LEAVE_SECONDS = 12.0
"""Seconds in which open answers are handed over before a worker leaves, which waits for 20 s in all."""

LONGEST_PATIENCE = 6.0
"""Seconds of a recovery after which back-offs do not count, so that answers do not wait under a long `--wait`."""

EQUAL_SHARE = 1 - EQUAL
"""The share of the slowest stage above which two plans over as many workers are equally fast."""


@dataclass(frozen=True)
class StartPlan:
    """Load and connect `plan`. `reason` is set when a plan that serves is replaced."""

    plan: Plan
    reason: str = ""


@dataclass(frozen=True)
class PreparePlan:
    """Let the workers that the plan in force does not use load their stages of `plan`, while it serves."""

    plan: Plan
    reason: str
    workers: frozenset[str]
    """Ids of the workers of which `plan` was made."""


@dataclass(frozen=True)
class StartAlone:
    """Run all stages in this process."""

    epoch: int


@dataclass(frozen=True)
class KeepPlan:
    """Keep the plan in force. `reason` says why no other plan is better."""

    reason: str


@dataclass(frozen=True)
class PostponePlan:
    """Keep the plan in force until no answer is open, or for POSTPONED_SECONDS. Then use `workers`, which joined."""

    workers: tuple[str, ...]


@dataclass(frozen=True)
class HandOver:
    """Back up all open answers within `seconds`, so that the next plan computes nothing of them again."""

    seconds: float


@dataclass(frozen=True)
class GiveUp:
    """Stop waiting: no plan is possible."""

    reason: str


Action = StartPlan | PreparePlan | StartAlone | KeepPlan | PostponePlan | HandOver | GiveUp


def decide(view: View, planner: Planner) -> Action | None:
    """Return the next action, or None to continue unchanged."""
    match view.phase:
        case Phase.GATHERING:
            return _plan_while_gathering(view, planner)
        case Phase.SERVING if not view.hands_over:
            return _plan_while_serving(view, planner)
        case _:
            return None


# ---- without a plan


def _plan_while_gathering(view: View, planner: Planner) -> Action | None:
    """Start a plan once one is possible and no further worker is expected. Serve alone, or give up, at the deadline."""
    settings = view.settings
    usable = _workers_for_a_first_plan(view, planner)
    enough = settings.nodes is not None and len(usable) >= settings.nodes
    missing = settings.nodes_required and not view.recovering and not enough
    first_wait = settings.wait if settings.first_wait is None else settings.first_wait
    wait = first_wait if missing else settings.wait
    problem, may_serve_alone = view.problem, not settings.nodes_required
    if usable and not missing and (view.recovering or enough or view.waited >= wait):
        try:
            plan = planner(usable, view.epoch + 1)
        except ClusterError as error:
            problem = str(error)
            # At the start, pinned layers that do not fit together are reported to the user as a mistake.
            may_serve_alone = may_serve_alone and isinstance(error, MemoryLimitError)
            if isinstance(error, LayerGapError):
                wait = first_wait
        else:
            if view.now >= view.retry_at:
                return StartPlan(plan)
    if view.waited >= settings.wait and (may_serve_alone or view.recovering) and _can_serve_alone(view):
        return StartAlone(view.epoch + 1)
    over = view.waited >= (settings.recovery_wait if view.recovering else wait)
    return GiveUp(_failure_reason(view, problem)) if over else None


def _workers_for_a_first_plan(view: View, planner: Planner) -> list[Member]:
    """Return the workers for a plan while none serves. The back-offs of failed ones end early if all are needed."""
    usable = view.usable()
    patience = LONGEST_PATIENCE if _can_serve_alone(view) else FIRST_BACKOFF
    if not view.recovering or view.waited < patience:
        return usable
    try:
        planner(usable, view.epoch + 1)
    except ClusterError:
        return view.ready()
    return usable


def _can_serve_alone(view: View) -> bool:
    return not (view.settings.why_not_alone or view.alone_problem)


# ---- with a plan


def _plan_while_serving(view: View, planner: Planner) -> Action | None:
    """Change the plan when one of its workers is leaving, or when workers joined."""
    leaving = [m for a in view.serving if (m := view.members[a]).state is MemberState.DRAINING]
    if not leaving:
        return _plan_with_joined(view, planner)
    if usable := view.candidates():
        if view.candidate_ids() == view.preparing:
            return None
        try:
            plan = planner(usable, view.epoch + 1)
        except ClusterError:
            plan = None
        if plan is not None and not _is_in_force(view, plan):
            return _after_hand_over(view, _change_to(view, plan, f"{leaving[0].name} is leaving"), LEAVE_SECONDS)
    # Without a replacement, the leaving worker serves until its process ends.
    return _after_hand_over(view, StartAlone(view.epoch + 1), LEAVE_SECONDS) if _can_serve_alone(view) else None


def _plan_with_joined(view: View, planner: Planner) -> Action | None:
    """Use workers that joined since the plan started, when no answer is open or after POSTPONED_SECONDS."""
    usable, ids = view.candidates(), view.candidate_ids()
    joined = [m for m in usable if m.address not in view.serving]
    if not joined:
        return None
    if ids in (view.considered, view.preparing):
        return None
    joined_since = max(view.since, *(m.ready_since for m in joined))
    waited = view.now - joined_since >= POSTPONED_SECONDS
    if view.open_requests and ids == view.postponed and not waited:
        return None
    if view.now - joined_since < SETTLE_SECONDS:
        return None
    names = tuple(m.name for m in joined)
    listed = ", ".join(names)
    try:
        plan = planner(usable, view.epoch + 1)
        if _is_in_force(view, plan) or _is_as_good(view, plan, planner):
            return KeepPlan(f"it is the best one with {listed}")
        action = _change_to(view, plan, f"{listed} joined")
        if not isinstance(action, StartPlan) or not view.open_requests or waited:
            return _after_hand_over(view, action, JOIN_SECONDS)
    except ClusterError as error:
        return KeepPlan(f"no plan with {listed}: {error}")
    return PostponePlan(names)


def _change_to(view: View, plan: Plan, reason: str) -> StartPlan | PreparePlan | None:
    """Start `plan` in place of the plan in force, once it is prepared, so that open answers wait for no load."""
    ids = view.candidate_ids()
    if ids == view.prepared or {*plan.nodes} <= {*view.serving}:
        return StartPlan(plan, reason)
    if view.now < view.retry_at:
        return None
    return PreparePlan(plan, reason, ids)


def _after_hand_over(view: View, action: Action | None, seconds: float) -> Action | None:
    """Hand open answers over before `action` replaces the plan in force, for at most `seconds`."""
    ends = isinstance(action, StartPlan | StartAlone)
    return HandOver(seconds) if ends and view.open_requests and view.hands_over_until is None else action


def _is_in_force(view: View, plan: Plan) -> bool:
    return (plan.nodes, plan.group_size) == (view.serving, view.group_size)


def _is_as_good(view: View, plan: Plan, planner: Planner) -> bool:
    """Return whether `plan` only puts an equal worker in the place of one in force, which would pause all answers."""
    if (len(plan.nodes), plan.group_size) != (len(view.serving), view.group_size):
        return False
    return plan.slowest_seconds > EQUAL_SHARE * _present(view, planner).slowest_seconds


def _present(view: View, planner: Planner) -> Plan:
    """Return what the planner says of the workers in force."""
    return planner([view.members[address] for address in view.serving], view.epoch)


# ---- reasons


def describe_wait(view: View, planner: Planner) -> str:
    """Return the workers that are ready, and what the first plan lacks, for people: workers with the reasons."""
    usable = view.usable()
    wanted = view.settings.nodes
    ready = f"{len(usable)} of {wanted}" if wanted else f"{len(usable)} ready"
    if not usable or (wanted and len(usable) < wanted):
        return "; ".join((ready, *_member_problems(view)))
    try:
        planner(usable, view.epoch + 1)
    except ClusterError as error:
        return f"{ready}, but {str(error).rstrip('.')}"
    return ready


def _failure_reason(view: View, problem: str) -> str:
    """Return why no plan is possible: the last problem, and the problem of each worker."""
    settings = view.settings
    missing = ""
    if settings.nodes_required and settings.nodes and not view.recovering:
        usable = len(view.usable())
        if usable < settings.nodes:
            fewer = f"--nodes {usable}, " if usable else ""
            missing = (
                f"{usable} of {settings.nodes} workers are ready. Start more mtp-worker processes, or pass "
                f"{fewer}a longer --wait, or --alone-ok"
            )
    found = [missing, problem, settings.why_not_alone, view.alone_problem, *_member_problems(view)]
    reasons = "; ".join(dict.fromkeys(filter(None, found))) or "no worker was found"
    return f"no plan can serve after {view.waited:.0f} s: {reasons}"


def _member_problems(view: View) -> list[str]:
    """Return why workers are not used."""
    return [text for _, m in sorted(view.members.items()) if (text := _member_problem(m, view.now))]


def _member_problem(member: Member, now: float) -> str:
    if member.state in (MemberState.LOST, MemberState.REFUSED):
        known = member.address in member.reason
        where = member.name if known else f"{member.name} at {member.address}"
        return f"{where}: {member.reason}"
    if member.backoff_until > now:
        return f"{member.name} is not used yet after {member.failure_count} failures"
    return ""
