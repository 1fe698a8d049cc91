"""The model a cluster serves, and how: what every Load says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.cluster.view import Member
from coordinator.model_costs import model_costs
from coordinator.plan import NodeSpec, Plan, Workload, make_plan
from mtp.checkpoint.checkpoint import Checkpoint
from proto import cluster_pb2 as pb

RESERVE_BYTES = 256 * 2**20
"""Kept free on every node for activations: a 512-token chunk of a 27B model needs about 100 MB."""


@dataclass(frozen=True)
class ServedModel:
    """`ref` is what workers are told; `dtype` None is the checkpoint's own, `kv_bits` 0 unquantized."""

    checkpoint: Checkpoint
    ref: pb.ModelRef
    dtype: str | None
    kv_bits: int
    with_head: bool
    draft_depth: int
    limits: pb.Limits

    def planner(self, link_seconds: float) -> Callable[[Sequence[Member], int], Plan]:
        """Members and an epoch → the plan over them, its stages named by address."""
        costs = model_costs(
            self.checkpoint,
            dtype=self.dtype,
            kv_bits=self.kv_bits or None,
            with_head=self.with_head,
        )
        workload = Workload(
            sequences=1,
            kv_tokens=min(self.checkpoint.config.max_positions, 4096),
            draft_depth=self.draft_depth,
            reserve_bytes=min(RESERVE_BYTES, self.weight_bytes // 4),
        )

        def plan(members: Sequence[Member], epoch: int) -> Plan:
            nodes = [NodeSpec(m.address, m.memory_limit, m.speed, m.pinned) for m in members]
            return make_plan(
                costs, nodes, workload=workload, link_seconds=link_seconds, epoch=epoch
            )

        return plan

    @property
    def weight_bytes(self) -> int:
        return sum(self.checkpoint.part_bytes().values())
