"""The model that a cluster serves, with the options of every Load request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from coordinator.cluster.view import Member
from coordinator.cluster.weight_provider import WeightProvider
from coordinator.planning.capacity import (
    DEFAULT_SEQUENCES,
    Capacity,
    model_costs,
    plan_capacity,
    reserve_bytes,
)
from coordinator.planning.groups import Machine, Parallel, Planning, Prefer, choose_plan
from coordinator.planning.plan import ModelCosts, NodeSpec, Plan, Workload
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.cut import Cut
from proto import cluster_pb2 as pb

SMALLEST_CONTEXT = 4096
"""Tokens of K/V that every plan must have room for. A shorter context is of little use to clients."""


@dataclass(frozen=True)
class ServedModel:
    """One checkpoint and its load options.

    `ref` identifies the checkpoint to workers. `dtype` None keeps the stored type. `kv_bits` 0 leaves keys and values
    unquantized. With `with_head` the last stage loads the MTP head, if the checkpoint has one. With `exact` an answer
    has the same bits on any number of equal machines, also in groups of a size that divides `slices`.
    """

    checkpoint: Checkpoint
    ref: pb.ModelRef
    dtype: str | None
    kv_bits: int
    with_head: bool
    draft_depth: int
    max_sequences: int = DEFAULT_SEQUENCES
    prefix_cache: bool = True
    share_weights: bool = False
    exact: bool = False
    slices: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    prefer: Prefer = Prefer.latency
    _costs: dict[int, ModelCosts] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def provider(self) -> WeightProvider:
        """Source of weights for workers that lack the checkpoint's files."""
        return WeightProvider(self.checkpoint, self.ref, self.share_weights)

    def costs_of(self, size: int) -> ModelCosts:
        """Return the costs of a member of a group of `size`. Raises SpanError if the layers cannot be cut."""
        if size not in self._costs:
            cut, kv_bits = self.checkpoint.cut_for(Cut(0, size)), self.kv_bits or None
            self._costs[size] = model_costs(
                cut, dtype=self.dtype, kv_bits=kv_bits, with_head=self.with_head
            )
        return self._costs[size]

    def planner(self) -> Callable[[Sequence[Member], int], Plan]:
        """Return a function from members and an epoch to a plan, whose stages name members by address."""
        workload = Workload(
            sequences=1,
            kv_tokens=min(self.checkpoint.config.max_positions, SMALLEST_CONTEXT),
            draft_depth=self.draft_depth,
            reserve_bytes=reserve_bytes(self.costs_of(1)),
        )
        slices = self.slices if self.exact else None
        planning = Planning(self.costs_of, workload, self.parallel, self.prefer, slices=slices)

        def plan(members: Sequence[Member], epoch: int) -> Plan:
            speeds = _speeds(members)
            specs = [
                NodeSpec(m.address, m.memory_limit, speeds[m.address], m.pinned) for m in members
            ]
            machines = [
                Machine(spec, kind=m.arithmetic, direct=m.direct, collectives=m.collectives)
                for spec, m in zip(specs, members, strict=True)
            ]
            return choose_plan(planning, machines, epoch)

        return plan

    def capacity(self, plan: Plan) -> Capacity:
        """Return the room of the plan's stages. Raises MemoryLimitError if one sequence does not fit."""
        costs, context = self.costs_of(plan.group_size), self.checkpoint.config.max_positions
        return plan_capacity(costs, plan.stages, context, self.max_sequences, self.prefix_cache)


def _speeds(members: Sequence[Member]) -> dict[str, float]:
    """Return the speeds by address, the best measurement of each chip, because the others were disturbed."""
    best: dict[str, float] = {}
    for member in members:
        best[member.chip] = max(member.speed, best.get(member.chip, 0.0))
    return {m.address: best[m.chip] if m.chip else m.speed for m in members}
