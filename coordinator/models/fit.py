"""The planner's answer for a model on the machines of this cluster: whether it fits, with which context, how fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planning.capacity import plan_capacity, reserve_bytes
from coordinator.planning.model_costs import model_costs
from coordinator.planning.plan import NodeSpec, Workload, make_plan
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import ClusterError

CONTEXTS = (4096, 32_768, 131_072, 262_144)
"""Tokens. The contexts that a fit is computed for, from a short chat to a long document."""

SEQUENCES = 1
"""Requests at once. With more, each has a part of the context."""


@dataclass(frozen=True)
class StageFit:
    """The part of the model that one machine would hold. `layers` is inclusive, such as `0-31`."""

    node: str
    layers: str
    weight_bytes: int


@dataclass(frozen=True)
class ModelFit:
    """The fit of one model. `context` is the largest one of a single request, in tokens; 0 if the model does not fit.

    `contexts` has for each of CONTEXTS whether it fits. `tokens_per_second` is an estimate for one answer without
    drafts. It counts only the reads of weights, at the memory speed that each machine measured. `problem` says why the
    model does not fit.
    """

    context: int = 0
    contexts: tuple[tuple[int, bool], ...] = ()
    tokens_per_second: float = 0.0
    stages: tuple[StageFit, ...] = ()
    problem: str = ""


def fit_model(checkpoint: Checkpoint, nodes: Sequence[NodeSpec]) -> ModelFit:
    """Return the fit of a model on `nodes`, from its headers alone."""
    longest = checkpoint.config.max_positions
    costs = model_costs(checkpoint, with_head=checkpoint.mtp.complete)
    workload = Workload(
        kv_tokens=min(CONTEXTS[0], longest),
        draft_depth=int(checkpoint.mtp.complete),
        reserve_bytes=reserve_bytes(costs),
    )
    try:
        plan = make_plan(costs, nodes, workload=workload)
        room = plan_capacity(costs, plan, longest, SEQUENCES, prefix_cache=False)
    except ClusterError as error:
        return ModelFit(problem=error.public)
    context = min(longest, room.kv_tokens)
    return ModelFit(
        context,
        tuple((one, one <= context) for one in CONTEXTS if one <= longest),
        round(1 / plan.pass_seconds, 2) if plan.pass_seconds else 0.0,
        tuple(StageFit(s.node, str(s.span), s.weight_bytes) for s in plan.stages),
    )
