"""The choice between one machine, a pipeline, and groups of machines that share every layer. Pure functions.

A pipeline divides the memory of a model and the time between two tokens of many streams. Only a group divides the time
of one token, because each of its members reads a share of every layer. It adds two sums over the members to each layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from coordinator.planning.capacity import model_costs, reserve_bytes
from coordinator.planning.plan import ModelCosts, NodeSpec, Plan, StagePlan, Workload, make_plan
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.cut import Cut
from proto.announcement import is_loopback
from proto.errors import ClusterError, SpanError, UsageError

MAX_GROUP = 8
"""Members of a group. People own two to eight Macs."""

SUMS_PER_LAYER = 2
"""Sums over the members: after attention or the GatedDeltaNet, and after the MLP."""

SUMS_PER_DRAFT = 3
"""Collectives of one step of the MTP head: the two sums of its layer, and the logits of all members."""

ROW_COSTS: Mapping[int, float] = {1: 1.0, 2: 1.2, 4: 1.6, 5: 1.62, 8: 1.63, 9: 2.75, 16: 2.76}
"""Seconds of a window's reads by its rows, over those of one row, before M5.

Two rows: published passes with one draft take 1.19 to 1.30 times as long on an M4 Pro (docs/MTP_HEAD.md). From five
rows on: products with 17408 x 5120 in 4 bits on an M4 Pro by mlx-dspark 0.20.3, whose kernel works as this one.
"""

EXPERT_ROW_COSTS: Mapping[int, float] = {1: 1.0, 2: 1.3, 4: 1.97}
"""The same for a mixture of experts, whose rows read other experts: one of 321 B on an M3 Ultra by TensorFold. It says
of 35B-A3B that four rows read twice the bytes of one. No more than three drafts are predicted."""

DEFAULT_COLLECTIVE = 300e-6
"""Seconds of a sum over a link that was not measured yet: TCP over a Thunderbolt bridge, by its users' figures."""

SLOWEST_COLLECTIVE = 20e-3
"""Seconds of a sum above which a group is refused: the 128 sums of a token of 27B then take 2.5 s."""

HOP_SECONDS = 1e-3
"""Seconds. Gap between two stages of a pipeline for one token, as measured on loopback (docs/measurements.md)."""


ONE_MACHINE = "one machine"
"""The name of the plan without a cut."""


@dataclass(frozen=True)
class Parallel:
    """The value of `--parallel`. `groups` of `size` machines; 0 for any number. A size of 1 is a pipeline."""

    auto: bool = False
    groups: int = 0
    size: int = 1

    @classmethod
    def parse(cls, text: str) -> Parallel:
        """Return the value of `auto`, `pipeline`, `tensor` or `GxN`. Raises UsageError for any other text."""
        if text == "auto":
            return cls(auto=True)
        if text == "pipeline":
            return cls()
        if text == "tensor":
            return cls(groups=1, size=0)
        found = re.fullmatch(r"(\d{1,2})x(\d{1,2})", text)
        if found is None or not (int(found[1]) and 2 <= int(found[2]) <= MAX_GROUP):
            raise UsageError(f"--parallel {text!r:.20}: write auto, pipeline, tensor, or groups x machines, as in 2x2")
        return cls(groups=int(found[1]), size=int(found[2]))

    @property
    def machines(self) -> int | None:
        """The number of machines that the user named, None if any number will do."""
        return self.groups * self.size or None

    def __str__(self) -> str:
        if self.auto:
            return "auto"
        if self.size == 1 and not self.groups:
            return "pipeline"
        return f"{self.groups}x{self.size}" if self.size else "tensor"


@dataclass(frozen=True)
class Machine:
    """A machine that may be a member of a group.

    `kind` is equal for machines that compute the same bits. `direct` is the host of its direct link to the others;
    without one it cannot be a member, since partial results are not encrypted. `collectives` are the measured seconds
    of a sum of one row, by the names of the group that has measured them.
    """

    node: NodeSpec
    kind: str = ""
    direct: str = ""
    collectives: Mapping[frozenset[str], float] = field(default_factory=dict)


def plan_machines(specs: Sequence[NodeSpec]) -> list[Machine]:
    """Return machines that are only planned, each with a direct link. Those of one speed are of one kind."""
    return [Machine(spec, f"speed {spec.speed:g}", spec.name) for spec in specs]


@dataclass(frozen=True)
class Prediction:
    """A possible plan, its name for people, and the predicted seconds of a token of one stream.

    `token` is that without drafts, `drafted` those with 1, 2, … drafts a window, none without a head. `depth` are the
    drafts that the user has fixed, or None.
    """

    text: str
    plan: Plan
    token: float
    drafted: tuple[float, ...] = ()
    depth: int | None = None

    @property
    def fastest(self) -> float:
        """Seconds of a token with the fixed number of drafts, or else with the best, which may be none."""
        found = (self.token, *self.drafted)
        return min(found) if self.depth is None else found[min(self.depth, len(self.drafted))]


@dataclass(frozen=True)
class Planning:
    """The facts of a choice besides the machines. `costs_of(size)` are the costs of a member's share."""

    costs_of: Callable[[int], ModelCosts]
    workload: Workload
    parallel: Parallel = Parallel()
    slices: int | None = None
    """Slices of each layer in exact mode, which every size of a group must divide. None without exact mode."""
    collective: float = DEFAULT_COLLECTIVE
    """Seconds of a sum over a group that has not measured it."""
    row_costs: Mapping[int, float] = field(default_factory=lambda: ROW_COSTS)
    """Seconds of the reads of a window over those of one row, by rows: measured on the machines, or the published."""
    depth: int | None = None
    """The drafts of every window, which the user has fixed. None lets the controller choose any number, also none."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        context: int,
        *,
        draft_depth: int = 0,
        parallel: Parallel = Parallel(),
        slices: int | None = None,
        collective: float = DEFAULT_COLLECTIVE,
        depth: int | None = None,
        **loading: Any,
    ) -> Planning:
        """Return the planning of `checkpoint`. `loading` are options of `model_costs`."""

        @cache
        def costs_of(size: int) -> ModelCosts:
            return model_costs(checkpoint.cut_for(Cut(0, size)), **loading)

        kv_tokens = min(context, checkpoint.config.max_positions)
        workload = Workload(kv_tokens, draft_depth, reserve_bytes(costs_of(1)))
        row_costs = EXPERT_ROW_COSTS if checkpoint.config.shape.routed_share < 1 else ROW_COSTS
        return cls(costs_of, workload, parallel, slices, collective, row_costs, depth)


def choose_plan(planning: Planning, machines: Sequence[Machine], epoch: int) -> Plan:
    """Return the plan that `--parallel` asks for. Raises the errors of `make_plan`, and SpanError for a group.

    `auto` takes the fastest for one stream with the drafts that it will have, and of equals the fastest for many.
    `tensor` takes several smaller groups if the layers cannot be cut for all machines. After the first plan, those that
    are left serve in smaller groups or as a pipeline, so that no answer waits for a machine that may not return.
    """
    parallel = planning.parallel
    if parallel.auto:
        found = predict_plans(planning, machines, epoch)
        chosen = min(found, key=lambda one: (one.fastest, one.plan.slowest_seconds))
        return replace(chosen.plan, reason=describe(chosen, found))
    problem: ClusterError | None = None
    for size, groups in _attempts(parallel, len(machines), is_first=epoch == 1):
        try:
            return _group_plan(planning, machines, size, epoch, groups)
        except ClusterError as error:
            problem = problem or error  # about what the user asked for
    assert problem is not None
    raise problem


def _attempts(parallel: Parallel, count: int, *, is_first: bool) -> Iterator[tuple[int, int]]:
    """Yield the sizes and numbers of groups to try for `count` machines, the best first."""
    size = parallel.size or min(count, MAX_GROUP)
    yield size, parallel.groups
    if is_first and parallel.size:
        return
    for smaller in range(size, 1 if is_first else 0, -1):
        yield smaller, 0


def describe(chosen: Prediction, found: Sequence[Prediction]) -> str:
    """Return why a plan was chosen: its predicted speed, and that of the others, each with its own drafts."""
    others = [f"{one.text} {1 / one.fastest:.3g}" for one in found if one is not chosen]
    text = f"{chosen.text}: {1 / chosen.fastest:.3g} tokens/s of one stream are predicted"
    text += " with drafts" * (chosen.fastest != chosen.token)
    return f"{text} ({', '.join(others)})" if others else text


def predict_plans(planning: Planning, machines: Sequence[Machine], epoch: int = 1) -> list[Prediction]:
    """Return every possible plan with its prediction. Raises the errors of the pipeline if there is none."""
    found: list[Prediction] = []
    problems: list[ClusterError] = []
    best = max(machines, key=lambda machine: machine.node.speed, default=None)
    options: list[tuple[Sequence[Machine], int]] = [] if best is None else [([best], 1)]
    options += [(machines, size) for size in range(1, min(len(machines), MAX_GROUP) + 1)]
    for some, size in options:
        if len(machines) == 1 and found:
            break
        try:
            plan = _group_plan(planning, some, size, epoch)
        except ClusterError as error:
            problems.append(error)
        else:
            found.append(_predict(planning, plan, some))
    if not found:
        raise problems[-1] if problems else UsageError("no node to plan for. Start a worker.")
    return found


def _predict(planning: Planning, plan: Plan, machines: Sequence[Machine]) -> Prediction:
    stages, size = len(plan.stages), plan.group_size
    kind = {1: ONE_MACHINE if stages == 1 else f"a pipeline of {stages}"}.get(size)
    text = kind or (f"a group of {size}" if stages == 1 else f"{stages} groups of {size}")
    last, costs = plan.stages[-1], planning.costs_of(size)
    draft = max(costs.draft_time(machine.node) for machine in machines if machine.node.name in last.nodes)
    sums = sum(stage.sum_seconds for stage in plan.stages)
    waits = sums + (stages - 1) * HOP_SECONDS
    reads = plan.pass_seconds - sums - planning.workload.draft_depth * draft
    draft += SUMS_PER_DRAFT * last.sum_seconds / (SUMS_PER_LAYER * len(last.span))
    drafted = (
        (reads * _row_cost(1 + depth, planning.row_costs) + waits + depth * draft) / tokens
        for depth, tokens in enumerate(_tokens(costs.accepted), start=1)
        if depth < max(planning.row_costs)
    )
    return Prediction(text, plan, reads + waits, tuple(drafted) if costs.draft_seconds else (), planning.depth)


def _tokens(accepted: Sequence[float]) -> list[float]:
    """Return the expected tokens of a window with 1, 2, … drafts."""
    return [1 + drafts for drafts in accumulate(accumulate(accepted, mul))]


def _row_cost(rows: int, costs: Mapping[int, float]) -> float:
    """Return the cost of a window of `rows` from the measured ones around it."""
    return float(np.interp(rows, sorted(costs), [costs[known] for known in sorted(costs)]))


def _group_plan(planning: Planning, machines: Sequence[Machine], size: int, epoch: int, groups: int = 0) -> Plan:
    """Return the best plan over groups of `size` machines, `groups` of them or as many as there are."""
    if planning.slices is not None and planning.slices % size:
        raise SpanError(
            f"groups of {size} machines cannot share {planning.slices} slices of a layer. Use a multiple of {size} for "
            "--slices."
        )
    if size == 1:
        nodes = [machine.node for machine in machines]
        return make_plan(planning.costs_of(1), nodes, workload=planning.workload, epoch=epoch)
    teams = group_machines(machines, size, groups)
    nodes = []
    for team in teams:  # each member holds a share, and the slowest one sets the speed
        limit = min(machine.node.memory_limit for machine in team)
        speed = min(machine.node.speed for machine in team)
        fixed = max(machine.node.layer_seconds for machine in team)
        operations = min(machine.node.operations for machine in team)
        nodes.append(NodeSpec(team[0].node.name, limit, speed, layer_seconds=fixed, operations=operations))
    found = make_plan(planning.costs_of(size), nodes, workload=planning.workload, epoch=epoch)
    by_name = {team[0].node.name: team for team in teams}
    stages = tuple(_shared(s, by_name[s.node], planning.collective) for s in found.stages)
    used = {node for stage in stages for node in stage.nodes}
    unused = tuple(m.node.name for m in machines if m.node.name not in used)
    return replace(found, stages=stages, unused=unused)


def _shared(stage: StagePlan, team: Sequence[Machine], expected: float) -> StagePlan:
    """Return a stage shared by `team`, whose sums take `expected` seconds if unmeasured. Raises SpanError if slow."""
    names = tuple(machine.node.name for machine in team)
    together = frozenset(names)
    measured = [m.collectives[together] for m in team if together in m.collectives]
    # A machine that was restarted since may have another link.
    collective = max(measured) if len(measured) == len(team) else expected
    seconds = SUMS_PER_LAYER * len(stage.span) * collective
    if collective > SLOWEST_COLLECTIVE:
        raise SpanError(
            f"the link of {', '.join(names)} is too slow for a group: a sum takes {collective * 1e3:.3g} ms, and those "
            f"of a token {seconds:.3g} s. Connect the machines by a cable, or leave out --parallel."
        )
    whole = stage.predicted_seconds + seconds
    return replace(stage, members=names, predicted_seconds=whole, sum_seconds=seconds)


def group_machines(machines: Sequence[Machine], size: int, groups: int = 0) -> list[tuple[Machine, ...]]:
    """Return `groups` groups (0: all) of `size` equal machines, the fastest first. Raises UsageError or SpanError."""
    kinds: dict[tuple[str, bool], list[Machine]] = {}
    for machine in machines:
        if machine.direct and machine.node.pinned is None:
            kinds.setdefault((machine.kind, is_loopback(machine.direct)), []).append(machine)
    teams = []
    for alike in kinds.values():
        in_order = sorted(alike, key=_strength, reverse=True)
        whole = len(in_order) // size * size
        teams += [tuple(in_order[i : i + size]) for i in range(0, whole, size)]
    if len(teams) < max(1, groups):
        raise _too_few(machines, size, max(1, groups), len(teams))
    teams.sort(key=lambda team: min(map(_strength, team)), reverse=True)
    return teams[: groups or len(teams)]


def _strength(machine: Machine) -> tuple[float, int]:
    return machine.node.speed, machine.node.memory_limit


def _too_few(machines: Sequence[Machine], size: int, groups: int, found: int) -> ClusterError:
    """Return why `machines` make fewer than `groups` groups of `size`."""
    if pinned := [m.node.name for m in machines if m.node.pinned is not None]:
        return UsageError(f"{pinned[0]} has --layers, and groups share every layer. Start it without --layers.")
    if without := [m.node.name for m in machines if not m.direct]:
        return SpanError(
            f"{', '.join(without)} has no direct link. Members of a group exchange partial results unencrypted: "
            "start the worker with --direct HOST, the address of a cable between the machines."
        )
    advice = "Add equal machines, or choose another --parallel."
    if len({machine.kind for machine in machines}) > 1:
        advice = (
            "Chips of other kinds round otherwise, so members would choose other tokens. Use --parallel pipeline: each "
            "machine gets layers by its speed."
        )
    described = "; ".join(f"{m.node.name}: {m.kind or 'unknown'}" for m in machines)
    return SpanError(
        f"{len(machines)} machines make {found} groups of {size} equal ones, {groups} are needed "
        f"({described}). {advice}"
    )
