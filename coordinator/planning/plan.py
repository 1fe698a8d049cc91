"""The plan: the assignment of layers to nodes. Pure functions from costs and nodes to stages or a reasoned error.

    stage seconds = (its layers + on the last stage lm_head + depth x draft step) / the node's speed
    stage bytes   = weights + K/V and states for the workload + what the node keeps free

The objective "throughput" minimizes the time of the slowest stage, which sets the pace when every stage has a
window in flight. The objective "latency" minimizes the sum of the times, for one stream with one window in flight.
Every node that can hold a layer gets one. With `spare`, a node stays idle where that improves the objective.
The search is exact (coordinator/planning/partition.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.planning.partition import Array, Objective, best_runs
from coordinator.planning.pinned_layers import check_pinned_layers
from proto.errors import MemoryLimitError, SpanError, UsageError
from proto.span import Span
from proto.terminal.size import format_size

_TICKS = 1e12
"""Ticks per second. Times are whole picoseconds, so that sums over equal layers are equal."""


@dataclass(frozen=True)
class LayerCost:
    """The costs of one layer: weights in bytes, and seconds of a one-token pass on a node of speed 1.

    `kv_bytes` are per token (attention layers), `state_bytes` per sequence (GDN layers).
    """

    weight_bytes: int
    seconds: float
    kv_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a model, in bytes and in seconds on a node of speed 1.

    `last_stage_bytes` counts final norm, lm_head and MTP head, without an embedding. `draft_seconds` is one step of
    the MTP head, lm_head included. `head_kv_bytes` is the head's K/V per token, `head_state_bytes` the hidden states
    of a sequence that may wait for the head. With `last_stage_needs_embed` the last stage holds a copy of the
    embedding, for a tied lm_head or for the MTP head.
    """

    layers: tuple[LayerCost, ...]
    embed_bytes: int = 0
    last_stage_bytes: int = 0
    lm_head_seconds: float = 0.0
    draft_seconds: float = 0.0
    head_kv_bytes: int = 0
    head_state_bytes: int = 0
    last_stage_needs_embed: bool = False


@dataclass(frozen=True)
class Workload:
    """The load that a plan must support.

    There are `sequences` at once with `kv_tokens` tokens in total. Each sequence has `open_windows` windows of
    `draft_depth` drafts. `reserve_bytes` stay free on every node, for activations and prefix entries.
    """

    sequences: int = 1
    kv_tokens: int = 0
    open_windows: int = 1
    draft_depth: int = 0
    reserve_bytes: int = 0


@dataclass(frozen=True)
class NodeSpec:
    """A machine: the bytes it may use, its speed relative to the others, and the layers it is pinned to."""

    name: str
    memory_limit: int
    speed: float = 1.0
    pinned: Span | None = None

    def __post_init__(self) -> None:
        if self.memory_limit <= 0 or not 1e-6 <= self.speed <= 1e6:
            raise UsageError(
                f"node {self.name}: memory {self.memory_limit} or speed {self.speed:g} is invalid. "
                "Give a memory above 0 and a speed from 1e-6 to 1e6."
            )


@dataclass(frozen=True)
class StagePlan:
    """The part of a plan that one node holds. `cache_bytes` counts K/V, states and the reserve."""

    node: str
    span: Span
    first: bool
    last: bool
    weight_bytes: int
    cache_bytes: int
    memory_limit: int
    predicted_seconds: float

    @property
    def bytes(self) -> int:
        """Memory of the stage: weights and caches."""
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True)
class Plan:
    """The stages in order. `unused` names the nodes without a stage."""

    epoch: int
    stages: tuple[StagePlan, ...]
    unused: tuple[str, ...] = ()
    link_seconds: float = 0.0

    def __post_init__(self) -> None:
        ends = [0, *(stage.span.end for stage in self.stages)]
        if not self.stages or ends[:-1] != [stage.span.start for stage in self.stages]:
            raise SpanError("the stages of a plan do not follow each other from layer 0")

    @property
    def slowest_seconds(self) -> float:
        """Time of the slowest stage: with enough windows in flight, the time between two steps."""
        return max(stage.predicted_seconds for stage in self.stages)

    @property
    def pass_seconds(self) -> float:
        """Time of one window through all stages and hops, those from and to the coordinator included."""
        hops = (len(self.stages) + 1) * self.link_seconds
        return sum(stage.predicted_seconds for stage in self.stages) + hops


def make_plan(
    model: ModelCosts,
    nodes: Sequence[NodeSpec],
    *,
    workload: Workload | None = None,
    objective: Objective = "throughput",
    link_seconds: float = 0.0,
    epoch: int = 1,
    spare: bool = False,
) -> Plan:
    """Return the best plan of `model` over `nodes`.

    Raises SpanError for pinned layers that overlap, exceed the model or leave a gap that no node can fill. Raises
    MemoryLimitError when no cut fits, with the bytes missing on each node. Raises UsageError when there is no node or
    two nodes share a name.
    """
    check_nodes(nodes)
    pinned = check_pinned_layers([(n.name, n.pinned) for n in nodes], len(model.layers))
    costs = _Costs(model, workload or Workload())
    seconds = np.stack([costs.seconds(node) for node in nodes])
    # An idle node saves a hop. Only the latency of one stream depends on the number of hops.
    link = link_seconds * _TICKS if objective == "latency" else 0.0
    runs = best_runs(seconds + np.rint(link), pinned, objective, spare=spare)
    if runs is None:
        raise MemoryLimitError(_shortage(costs, nodes, pinned))
    used = {v for v, _, _ in runs}
    return Plan(
        epoch=epoch,
        stages=tuple(costs.stage(nodes[v], Span(start, end)) for v, start, end in runs),
        unused=tuple(node.name for v, node in enumerate(nodes) if v not in used),
        link_seconds=link_seconds,
    )


def check_nodes(nodes: Sequence[NodeSpec]) -> None:
    """Raise UsageError unless there is a node and the names of all nodes differ."""
    names = [node.name for node in nodes]
    if not names:
        raise UsageError("no node to plan for. Start a worker, or name one with --node.")
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"two nodes are named {sorted(twice)[0]}. Give each node its own --name.")


class _Costs:
    """The costs of every run of layers `[a, b)`, as matrices `[layers + 1, layers + 1]` indexed by a and b."""

    def __init__(self, model: ModelCosts, workload: Workload) -> None:
        self.model = model
        self.workload = workload
        self.count = len(model.layers)
        states = workload.sequences * (1 + workload.open_windows)
        caches = [
            layer.kv_bytes * workload.kv_tokens + layer.state_bytes * states
            for layer in model.layers
        ]
        self.weight_bytes = self._sums([layer.weight_bytes for layer in model.layers])
        self.weight_bytes[0, :] += model.embed_bytes
        copy = model.embed_bytes if model.last_stage_needs_embed else 0
        self.weight_bytes[1:, -1] += model.last_stage_bytes + copy
        self.weight_bytes[0, -1] += model.last_stage_bytes
        self.cache_bytes = self._sums(caches) + workload.reserve_bytes
        self.cache_bytes[:, -1] += model.head_kv_bytes * workload.kv_tokens

    def seconds(self, node: NodeSpec) -> Array:
        """Return whole picoseconds on `node`; inf for empty runs and for runs that exceed its memory."""
        ticks = self._ticks(node)
        ticks[self.weight_bytes + self.cache_bytes > node.memory_limit] = np.inf
        return ticks

    def overflow(self, node: NodeSpec) -> Array:
        """Return the bytes by which each run exceeds the memory of `node`; inf for empty runs."""
        missing = self.weight_bytes + self.cache_bytes - node.memory_limit
        return np.maximum(missing, 0.0) + self._nothing()

    def stage(self, node: NodeSpec, span: Span) -> StagePlan:
        """Return the stage that holds `span` on `node`."""
        at = span.start, span.end
        return StagePlan(
            node=node.name,
            span=span,
            first=span.start == 0,
            last=span.end == self.count,
            weight_bytes=int(self.weight_bytes[at]),
            cache_bytes=int(self.cache_bytes[at]),
            memory_limit=node.memory_limit,
            predicted_seconds=float(self._ticks(node)[at]) / _TICKS,
        )

    def _ticks(self, node: NodeSpec) -> Array:
        scale = _TICKS / node.speed
        ends = self.model.lm_head_seconds + self.workload.draft_depth * self.model.draft_seconds
        ticks = self._sums([np.rint(layer.seconds * scale) for layer in self.model.layers])
        ticks[:, -1] += np.rint(ends * scale)
        return ticks + self._nothing()

    def _sums(self, values: Sequence[float]) -> Array:
        upto = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
        sums: Array = upto[None, :] - upto[:, None]
        return sums

    def _nothing(self) -> Array:
        """Return inf for empty runs and 0 for all others."""
        starts, ends = np.indices((self.count + 1, self.count + 1))
        nothing: Array = np.where(starts < ends, 0.0, np.inf)
        return nothing


def _shortage(costs: _Costs, nodes: Sequence[NodeSpec], pinned: Mapping[int, Span]) -> str:
    """Return the reason why no cut fits, for the closest cut: the one whose worst node lacks the fewest bytes."""
    overflow = np.stack([costs.overflow(node) for node in nodes])
    runs = best_runs(overflow, pinned, "throughput", spare=True)
    assert runs is not None, "check_pinned_layers leaves a cut when memory does not matter"
    lacking = [
        f"{nodes[v].name} (limit {format_size(nodes[v].memory_limit)}) lacks "
        f"{format_size(int(overflow[v, start, end]))} for layers {Span(start, end)}"
        for v, start, end in runs
        if overflow[v, start, end] > 0
    ]
    weights = format_size(int(costs.weight_bytes[0, -1]))
    caches = format_size(int(costs.cache_bytes[0, -1]))
    limits = format_size(sum(node.memory_limit for node in nodes))
    return (
        f"the model does not fit: weights of {weights} and {caches} for requests, {limits} on "
        f"{len(nodes)} node{'s' * (len(nodes) > 1)}. In the closest cut, {'; '.join(lacking)}. "
        "Add a node, use a smaller quantization, or serve fewer tokens at once."
    )
