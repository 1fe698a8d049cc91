"""The plan: the assignment of layers to nodes. Pure functions from costs and nodes to stages or a reasoned error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from coordinator.planning.partition import Array, best_runs
from proto.errors import MemoryLimitError, SpanError, UsageError
from proto.span import Span
from proto.terminal.progress import format_size


class LayerGapError(SpanError):
    """The pinned layers leave more gaps than there are unpinned nodes. Another worker could fill one."""


def check_pinned_layers(
    nodes: Sequence[tuple[str, Span | None]], num_layers: int
) -> dict[int, Span]:
    """Return the pinned spans by the index of their node in `nodes`, which are pairs of name and span.

    Raises SpanError, naming layers and nodes, when a span exceeds the model, when two spans overlap, or when they
    leave more gaps than there are unpinned nodes.
    """
    pinned = {v: span for v, (_, span) in enumerate(nodes) if span is not None}
    for v, span in pinned.items():
        if span.end > num_layers:
            raise SpanError(
                f"{nodes[v][0]} is pinned to layers {span}: "
                f"the model has {num_layers}, 0-{num_layers - 1}"
            )
    in_order = sorted(pinned, key=lambda v: (pinned[v].start, pinned[v].end))
    for a, b in pairwise(in_order):
        if pinned[b].start < pinned[a].end:
            both = Span(pinned[b].start, min(pinned[a].end, pinned[b].end))
            raise SpanError(
                f"both {nodes[a][0]} ({pinned[a]}) and {nodes[b][0]} ({pinned[b]}) are pinned to "
                f"{_layers(both)}: change --layers of one"
            )
    gaps = _gaps([pinned[v] for v in in_order], num_layers)
    free = len(nodes) - len(pinned)
    if len(gaps) > free:
        held = ", ".join(f"{nodes[v][0]} {pinned[v]}" for v in in_order)
        others = f"{free} without --layers cannot fill {len(gaps)} gaps"
        raise LayerGapError(
            f"no worker holds {' and '.join(map(_layers, gaps))} (pinned: {held})"
            f"{'; ' + others if free else ''}: change --layers, or add a worker without it"
        )
    return pinned


def _gaps(spans: Sequence[Span], num_layers: int) -> list[Span]:
    """Return the layers that `spans`, sorted and disjoint, do not cover."""
    ends = [0, *(span.end for span in spans)]
    starts = [*(span.start for span in spans), num_layers]
    return [Span(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def _layers(span: Span) -> str:
    return f"layer {span.start}" if len(span) == 1 else f"layers {span}"


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
        """Time of one window through all stages, without the hops between them."""
        return sum(stage.predicted_seconds for stage in self.stages)


def make_plan(
    model: ModelCosts,
    nodes: Sequence[NodeSpec],
    *,
    workload: Workload | None = None,
    epoch: int = 1,
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
    runs = best_runs(seconds, pinned)
    if runs is None:
        raise MemoryLimitError(_shortage(costs, nodes, pinned))
    used = {v for v, _, _ in runs}
    return Plan(
        epoch=epoch,
        stages=tuple(costs.stage(nodes[v], Span(start, end)) for v, start, end in runs),
        unused=tuple(node.name for v, node in enumerate(nodes) if v not in used),
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
    runs = best_runs(overflow, pinned)
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
