"""The plan: the assignment of layers to nodes. Pure functions from costs and nodes to stages or a reasoned error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from proto.errors import MemoryLimitError, SpanError, UsageError
from proto.span import Span
from proto.terminal.progress import format_size


class LayerGapError(SpanError):
    """The pinned layers leave more gaps than there are unpinned nodes. Another worker could fill one."""


def check_pinned_layers(nodes: Sequence[NodeSpec], model: ModelCosts) -> dict[int, Span]:
    """Return the pinned spans by their index in `nodes`. Raises SpanError for a misfit."""
    num_layers, first = len(model.layers), model.first_layers
    pinned = {v: node.pinned for v, node in enumerate(nodes) if node.pinned is not None}
    for v, span in pinned.items():
        if span.end > num_layers:
            raise SpanError(
                f"{nodes[v].name} is pinned to layers {span}: the model has {num_layers}, 0-{num_layers - 1}"
            )
        if 0 < span.start < first or (span.start == 0 and span.end < first):
            raise SpanError(
                f"--layers {span}: the layers up to {first - 1} read the tokens, so they belong to the first machine."
            )
    in_order = sorted(pinned, key=lambda v: (pinned[v].start, pinned[v].end))
    for a, b in pairwise(in_order):
        if pinned[b].start < pinned[a].end:
            both = Span(pinned[b].start, min(pinned[a].end, pinned[b].end))
            raise SpanError(
                f"both {nodes[a].name} ({pinned[a]}) and {nodes[b].name} ({pinned[b]}) are pinned to "
                f"{_layers(both)}: change --layers of one"
            )
    ends = [0, *(pinned[v].end for v in in_order)]
    starts = [*(pinned[v].start for v in in_order), num_layers]
    pairs = zip(ends, starts, strict=True)
    gaps = [Span(end, start) for end, start in pairs if end < start]
    free = len(nodes) - len(pinned)
    if len(gaps) > free:
        held = ", ".join(f"{nodes[v].name} {pinned[v]}" for v in in_order)
        others = f"{free} without --layers cannot fill {len(gaps)} gaps"
        raise LayerGapError(
            f"no worker holds {' and '.join(map(_layers, gaps))} (pinned: {held})"
            f"{'; ' + others if free else ''}: change --layers, or add a worker without it"
        )
    return pinned


def _layers(span: Span) -> str:
    return f"layer {span.start}" if len(span) == 1 else f"layers {span}"


_TICKS = 1e12
"""Ticks per second. Times are whole picoseconds, so that sums over equal layers are equal."""


@dataclass(frozen=True)
class LayerCost:
    """The bytes of a layer, and its seconds for a token at speed 1. K/V is per token, states are per sequence."""

    weight_bytes: int
    seconds: float
    kv_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a model, in bytes and in seconds on a node of speed 1.

    `last_stage_bytes` counts final norm, lm_head and MTP head, without an embedding. `draft_seconds` is one step of the
    MTP head, lm_head included. `head_kv_bytes` is the head's K/V per token, `head_state_bytes` the hidden states of a
    sequence that may wait for the head. With `last_stage_needs_embed` the last stage holds a copy of the embedding, for
    a tied lm_head or for the MTP head. The first stage holds at least `first_layers`, because they read the tokens.
    """

    layers: tuple[LayerCost, ...]
    embed_bytes: int = 0
    last_stage_bytes: int = 0
    lm_head_seconds: float = 0.0
    draft_seconds: float = 0.0
    head_kv_bytes: int = 0
    head_state_bytes: int = 0
    last_stage_needs_embed: bool = False
    first_layers: int = 1
    launches: float = 1.0
    """Launches of a layer, as a multiple of those that `NodeSpec.layer_seconds` are for."""
    accepted: tuple[float, ...] = ()
    """The share of each draft that is right after right ones. A window has at most as many drafts."""

    def draft_time(self, node: NodeSpec) -> float:
        """Return the seconds of one step of the MTP head on `node`, which is a layer and lm_head; 0 without a head."""
        return self.draft_seconds / node.speed + node.layer_seconds * self.launches * (self.draft_seconds > 0)


@dataclass(frozen=True)
class Workload:
    """The load that a plan must support.

    It is one sequence of `kv_tokens` tokens, with an open window of `draft_depth` drafts. `reserve_bytes` stay free on
    every node, for activations and prefix entries.
    """

    kv_tokens: int = 0
    draft_depth: int = 0
    reserve_bytes: int = 0


@dataclass(frozen=True)
class NodeSpec:
    """A machine: the bytes it may use, its speed relative to the others, and the layers it is pinned to.

    A layer takes `layer_seconds` besides reading its weights. `blocks` are the first layer, the end and the bytes of
    prefixes that its disk has.
    """

    name: str
    memory_limit: int
    speed: float = 1.0
    pinned: Span | None = None
    layer_seconds: float = 0.0
    blocks: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.memory_limit <= 0 or not 1e-6 <= self.speed <= 1e6:
            raise UsageError(
                f"node {self.name}: memory {self.memory_limit} or speed {self.speed:g} is invalid. "
                "Give a memory above 0 and a speed from 1e-6 to 1e6."
            )


@dataclass(frozen=True)
class StagePlan:
    """The part of a plan that one node holds. `cache_bytes` counts K/V, states and the reserve.

    The nodes of a group hold a stage together. `members` then are all of them, `node` first, and the bytes are those
    of each. `sum_seconds` of `predicted_seconds` are those of the sums over the members.
    """

    node: str
    span: Span
    first: bool
    last: bool
    weight_bytes: int
    cache_bytes: int
    memory_limit: int
    predicted_seconds: float
    members: tuple[str, ...] = ()
    sum_seconds: float = 0.0

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that hold the stage: the members of its group, or one."""
        return self.members or (self.node,)


@dataclass(frozen=True)
class Plan:
    """The stages in order. `unused` names the nodes without a stage, `reason` says why this plan was chosen."""

    epoch: int
    stages: tuple[StagePlan, ...]
    unused: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        ends = [0, *(stage.span.end for stage in self.stages)]
        if not self.stages or ends[:-1] != [stage.span.start for stage in self.stages]:
            raise SpanError("the stages of a plan do not follow each other from layer 0")

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of all stages, in order."""
        return tuple(node for stage in self.stages for node in stage.nodes)

    @property
    def group_size(self) -> int:
        """Nodes that hold each stage together."""
        return len(self.stages[0].nodes)

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

    Raises SpanError for pinned layers, MemoryLimitError with the missing bytes, or UsageError for the names of nodes.
    """
    names = [node.name for node in nodes]
    if not names:
        raise UsageError("no node to plan for. Start a worker, or name one with --node.")
    if extra := [node.name for node in nodes if node.pinned is None][MAX_FREE_NODES:]:
        raise UsageError(
            f"a plan takes at most {MAX_FREE_NODES} machines without --layers. "
            f"Stop {', '.join(extra)}, or start it with --layers."
        )
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"two nodes are named {sorted(twice)[0]}. Give each node its own --name.")
    pinned = check_pinned_layers(nodes, model)
    costs = _Costs(model, workload or Workload())
    seconds = np.stack([costs.seconds(node) for node in nodes])
    runs = best_runs(seconds, pinned)
    if runs is None:
        raise MemoryLimitError(_shortage(costs, nodes, pinned))
    runs, reason = _with_room(costs, nodes, pinned, seconds, runs)
    runs = _with_blocks(costs, nodes, pinned, seconds, runs)
    used = {v for v, _, _ in runs}
    stages = tuple(costs.stage(nodes[v], Span(start, end)) for v, start, end in runs)
    unused = tuple(node.name for v, node in enumerate(nodes) if v not in used)
    return Plan(epoch=epoch, stages=stages, unused=unused, reason=reason)


EQUAL = 0.05
"""Share of its speed by which two plans differ that are equally fast: speeds are measured."""

SLOWER = 0.1
"""The part of its speed that a plan gives up at most for room."""

ROOMIER = 1.5
"""Factor of the tokens that must have room in turn."""


def _with_room(
    costs: _Costs,
    nodes: Sequence[NodeSpec],
    pinned: Mapping[int, Span],
    seconds: Array,
    fastest: list[Run],
) -> tuple[list[Run], str]:
    """Return `fastest`, or a cut that is little slower and has room for many more tokens, with the reason for people.

    Layers of equal times may hold very unequal weights, as where the last stage drafts: one stage is then full.
    """
    room = np.stack([costs.room(node) for node in nodes])
    slowest = max(seconds[run] for run in fastest)
    load = np.where(seconds <= slowest * (1 + SLOWER), np.rint(1e15 / np.maximum(room, 1)), np.inf)
    runs = best_runs(load, pinned) or fastest
    few, many = (min(room[run] for run in cut) for cut in (fastest, runs))
    if len(runs) != len(fastest) or many <= ROOMIER * few:
        return fastest, ""
    loss = max(seconds[run] for run in runs) / slowest - 1 if slowest else 0.0
    more = f"{many / max(few, 1):.1f} times the tokens"
    return runs, f"{loss:.0%} slower than the fastest cut, with room for {more}"


def _with_blocks(
    costs: _Costs, nodes: Sequence[NodeSpec], pinned: Mapping[int, Span], seconds: Array, runs: list[Run]
) -> list[Run]:
    """Return `runs`, or a cut that is as fast and in which more machines have the layers whose prefixes they have."""
    held = np.zeros((len(nodes), costs.count))
    for own, node in zip(held, nodes, strict=True):
        for start, end, nbytes in node.blocks:
            own[max(0, start) : max(0, end)] += nbytes / max(1, end - start)
    if not held.any():
        return runs
    held /= np.maximum(held.max(axis=0), 1.0)
    room = np.stack([costs.room(node) for node in nodes])
    slowest, least = max(seconds[run] for run in runs), min(room[run] for run in runs)
    lacking = np.rint(1e4 * np.stack([costs.sums(1 - own) for own in held]))
    balance = np.rint(1e3 * np.minimum(seconds / slowest, 2.0) ** 2) if slowest else 0.0
    allowed = (seconds <= slowest * (1 + EQUAL)) & (room >= least * (1 - EQUAL))
    return cheapest_runs(np.where(allowed, 1e6 * lacking + balance, np.inf), pinned, len(runs)) or runs


class _Costs:
    """The costs of every run of layers `[a, b)`, as matrices `[layers + 1, layers + 1]` indexed by a and b."""

    def __init__(self, model: ModelCosts, workload: Workload) -> None:
        self.model = model
        self.workload = workload
        self.count = len(model.layers)
        tokens = workload.kv_tokens
        # Two states: the present one, and the snapshot of the open window.
        caches = [layer.kv_bytes * tokens + layer.state_bytes * 2 for layer in model.layers]
        self.weight_bytes = self.sums([layer.weight_bytes for layer in model.layers])
        self.weight_bytes[0, :] += model.embed_bytes
        copy = model.embed_bytes if model.last_stage_needs_embed else 0
        self.weight_bytes[1:, -1] += model.last_stage_bytes + copy
        self.weight_bytes[0, -1] += model.last_stage_bytes
        self.cache_bytes = self.sums(caches) + workload.reserve_bytes
        self.cache_bytes[:, -1] += model.head_kv_bytes * workload.kv_tokens

    def seconds(self, node: NodeSpec) -> Array:
        """Return whole picoseconds on `node`; inf for empty runs and for runs that exceed its memory."""
        ticks = self._ticks(node)
        ticks[self.weight_bytes + self.cache_bytes > node.memory_limit] = np.inf
        return ticks

    def room(self, node: NodeSpec) -> Array:
        """Return the tokens for whose K/V each run leaves room on `node`."""
        tokens = self.sums([layer.kv_bytes for layer in self.model.layers])
        tokens[:, -1] += self.model.head_kv_bytes
        free = node.memory_limit - self.weight_bytes - self.cache_bytes
        return np.maximum(free, 0.0) / np.maximum(tokens, 1.0)

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
        drafts = self.workload.draft_depth * self.model.draft_time(node)
        fixed = node.layer_seconds * self.model.launches * _TICKS
        ticks = self.sums([np.rint(layer.seconds * scale + fixed) for layer in self.model.layers])
        ticks[:, -1] += np.rint(self.model.lm_head_seconds * scale + drafts * _TICKS)
        return ticks + self._nothing()

    def sums(self, values: Sequence[float] | Array) -> Array:
        """Return the sums of the values of the layers of each run."""
        upto = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
        sums: Array = upto[None, :] - upto[:, None]
        return sums

    def _nothing(self) -> Array:
        """Return inf for empty runs, and for those that part the layers of the first stage. 0 for all others."""
        starts, ends = np.indices((self.count + 1, self.count + 1))
        first = self.model.first_layers
        parts = ((starts > 0) & (starts < first)) | ((starts == 0) & (ends < first))
        nothing: Array = np.where((starts < ends) & ~parts, 0.0, np.inf)
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


Array = npt.NDArray[np.float64]
Run = tuple[int, int, int]
"""A run of layers: index of the node, first layer, and end (exclusive)."""

MAX_FREE_NODES = 10
"""Nodes without pinned layers. The search tries every set of them: ten take 0.2 s. People own two to eight."""


@dataclass(frozen=True)
class Table:
    """The best values, `[sets of free nodes, layers + 1]`, and the last node and its first layer for each.

    Bit i of the number of a set is the i-th free node. So a set comes after all its subsets.
    """

    values: Array
    node: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]


def best_runs(costs: Array, pinned: Mapping[int, Span]) -> list[Run] | None:
    """Return the runs of layers, in order, that cover the model with the fastest slowest run; None when no runs can.

    `costs[v, a, b]` is the cost of layers [a, b) on node v, inf where the node cannot hold them. Nodes in `pinned` take
    their span and are always used. The search uses as many other nodes as possible. The costs must be whole numbers, so
    that equal sums compare as equal floats. Ties go to the more balanced cut: the least sum of squares.
    """
    free = [v for v in range(len(costs)) if v not in pinned]
    costs = _around(costs, pinned, free)
    values = _search(costs, free, pinned, np.maximum).values[:, -1]
    possible = [s for s, value in enumerate(values) if value < np.inf]
    if not possible:
        return None
    size = max(s.bit_count() for s in possible)
    best = min(values[s] for s in possible if s.bit_count() == size)
    return cheapest_runs(np.where(costs <= best, costs**2, np.inf), pinned, size + len(pinned))


def cheapest_runs(costs: Array, pinned: Mapping[int, Span], count: int) -> list[Run] | None:
    """Return `count` runs, in order, that cover the model with the least sum of costs; None when no runs can."""
    free = [v for v in range(len(costs)) if v not in pinned]
    table = _search(_around(costs, pinned, free), free, pinned, np.add)
    sets = [s for s in range(2 ** len(free)) if s.bit_count() + len(pinned) == count]
    best = min(sets, key=lambda s: table.values[s, -1], default=0)
    return _trace(table, free, pinned, best) if table.values[best, -1] < np.inf else None


def _around(costs: Array, pinned: Mapping[int, Span], free: Sequence[int]) -> Array:
    """Return `costs` with inf for every run of a free node that contains a pinned layer."""
    costs = costs.copy()
    starts, ends = np.indices(costs.shape[1:])
    for span in pinned.values():
        costs[np.ix_(free)] = np.where((starts < span.end) & (ends > span.start), np.inf, costs[np.ix_(free)])
    return costs


def _search(costs: Array, free: Sequence[int], pinned: Mapping[int, Span], combine: np.ufunc) -> Table:
    """Fill the table, set by set. Of equal nodes the last ones hold the last layers."""
    shape = (2 ** len(free), costs.shape[1])
    table = Table(np.full(shape, np.inf), *(np.full(shape, -1, np.int64) for _ in range(2)))
    table.values[0, 0] = 0.0
    for state, values in enumerate(table.values):
        for i in reversed(range(len(free))):
            if not state & 1 << i:
                continue
            candidates = combine(table.values[state ^ 1 << i][:, None], costs[free[i]])
            start = candidates.argmin(axis=0)
            found = np.take_along_axis(candidates, start[None], axis=0)[0]
            better = found < values
            values[better] = found[better]
            table.start[state][better] = start[better]
            table.node[state][better] = i
        for v, span in sorted(pinned.items(), key=lambda item: item[1].start):
            values[span.end] = combine(values[span.start], costs[v, span.start, span.end])
    return table


def _trace(table: Table, free: Sequence[int], pinned: Mapping[int, Span], state: int) -> list[Run]:
    """Return the runs that led to `state`, first to last."""
    ends = {span.end: (v, span.start) for v, span in pinned.items()}
    runs: list[Run] = []
    end = table.values.shape[1] - 1
    while end > 0:
        if end in ends:
            v, start = ends[end]
        else:
            node, start = int(table.node[state, end]), int(table.start[state, end])
            v, state = free[node], state ^ 1 << node
        runs.append((v, start, end))
        end = start
    return runs[::-1]
