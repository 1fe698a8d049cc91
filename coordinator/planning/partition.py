"""The exact search: which node takes which layers, and in what order.

A *state* is a set of free nodes already placed. For each state and each count i of layers, the search
holds the best value of covering the first i layers with exactly those nodes and with every pinned node
whose span lies there. One step adds a node v with the layers [a, i):

    value[state + v][i] = min over a of combine(value[state][a], cost[v][a, i])

with combine = max for the slowest stage and + for the sum. Both are monotone, so the best whole is made of
best parts and nothing is missed. A pinned node has one possible step, in every state.

Nodes that cost the same on every run of layers are alike: placing them in the order given loses nothing.
So n equal nodes make n + 1 states, and n unlike ones 2^n. Above MAX_STATES the order given is kept; the
states are then (how many are placed, which came last).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from proto.span import Span

Objective = Literal["throughput", "latency"]
Array = npt.NDArray[np.float64]
Run = tuple[int, int, int]
"""Node, first layer, layer after the last."""

MAX_STATES = 1024
"""A step takes some 20 µs at 64 layers: ten unlike nodes in any order take 0.1 s."""


@dataclass(frozen=True)
class States:
    """`steps[s]` are the pairs (state before, node added) that lead to state s; state 0 has none placed.

    `sizes[s]` counts its nodes. A state comes after every state that leads to it.
    """

    steps: tuple[tuple[tuple[int, int], ...], ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """Of each state: the best values `[states, layers + 1]`, and the step each one came from."""

    values: Array
    before: npt.NDArray[np.int64]
    node: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]


def best_runs(
    costs: Array, pinned: Mapping[int, Span], objective: Objective, *, spare: bool
) -> list[Run] | None:
    """The runs of layers, in order, that cover the model at the least cost; None when none can.

    `costs[v, a, b]` is what node v takes for layers [a, b), inf where it cannot hold them. Nodes of
    `pinned` take their span and are always used. As many of the others as can be are used; with
    `spare`, as many as serve the objective best. Values that are equal stay comparable as floats only
    when they are whole numbers.

    Ties go to the more balanced cut: least sum of squares for throughput, least slowest stage for latency.
    """
    free = [v for v in range(len(costs)) if v not in pinned]
    costs = _around(costs, pinned, free)
    states = list_states(costs, free)
    if objective == "throughput":
        first = _search(states, costs, pinned, np.maximum)
    else:
        first = _search(states, costs, pinned, np.add)
    chosen = _final_states(states, first.values[:, -1], spare)
    if not chosen:
        return None
    best = first.values[chosen[0], -1]
    if objective == "throughput":
        allowed = np.where(costs <= best, costs**2, np.inf)
        second = _search(states, allowed, pinned, np.add)
    else:
        second = _search(states, costs, pinned, np.maximum, tight=first.values)
    state = min(chosen, key=lambda s: second.values[s, -1])
    return _trace(second, pinned, state)


def _around(costs: Array, pinned: Mapping[int, Span], free: Sequence[int]) -> Array:
    """Costs with inf for every run of a free node that touches a pinned layer."""
    costs = costs.copy()
    starts, ends = np.indices(costs.shape[1:])
    for span in pinned.values():
        costs[np.ix_(free)] = np.where(
            (starts < span.end) & (ends > span.start), np.inf, costs[np.ix_(free)]
        )
    return costs


def list_states(costs: Array, free: Sequence[int]) -> States:
    """Sets of free nodes, or the order given where those are too many."""
    alike: dict[bytes, list[int]] = {}
    for v in free:
        alike.setdefault(costs[v].tobytes(), []).append(v)
    count = 1
    for nodes in alike.values():
        count *= len(nodes) + 1
    if count > MAX_STATES:
        return _ordered_states(free)
    earlier = {v: nodes[:i] for nodes in alike.values() for i, v in enumerate(nodes)}
    return _set_states(free, earlier)


def _set_states(free: Sequence[int], earlier: Mapping[int, Sequence[int]]) -> States:
    """Every set of nodes that holds, with a node, those like it that come `earlier`."""
    number: dict[frozenset[int], int] = {frozenset(): 0}
    steps: list[list[tuple[int, int]]] = [[]]
    queue = list(number)
    for placed in queue:
        for v in free:
            if v in placed or not placed.issuperset(earlier[v]):
                continue
            grown = placed | {v}
            if grown not in number:
                number[grown] = len(number)
                steps.append([])
                queue.append(grown)
            steps[number[grown]].append((number[placed], v))
    return States(tuple(map(tuple, steps)), tuple(map(len, queue)))


def _ordered_states(free: Sequence[int]) -> States:
    """(how many nodes are placed, index of the last): later ones only follow."""
    number: dict[tuple[int, int], int] = {(0, -1): 0}
    steps: list[list[tuple[int, int]]] = [[]]
    for size in range(1, len(free) + 1):
        for last in range(size - 1, len(free)):
            number[size, last] = len(number)
            steps.append(
                [
                    (number[size - 1, before], free[last])
                    for before in range(-1, last)
                    if (size - 1, before) in number
                ]
            )
    return States(tuple(map(tuple, steps)), tuple(size for size, _ in number))


def _search(
    states: States,
    costs: Array,
    pinned: Mapping[int, Span],
    combine: np.ufunc,
    tight: Array | None = None,
) -> Table:
    """Fill the table, state by state. With `tight`, only steps that are best for those sums count."""
    shape = (len(states.steps), costs.shape[1])
    table = Table(np.full(shape, np.inf), *(np.full(shape, -1, np.int64) for _ in range(3)))
    for state, steps in enumerate(states.steps):
        values = table.values[state]
        if state == 0:
            values[0] = 0.0
        for before, v in steps:
            candidates = combine(table.values[before][:, None], costs[v])
            if tight is not None:
                candidates[tight[before][:, None] + costs[v] != tight[state]] = np.inf
            start = candidates.argmin(axis=0)
            found = np.take_along_axis(candidates, start[None], axis=0)[0]
            better = found < values
            values[better] = found[better]
            table.start[state][better] = start[better]
            table.before[state][better] = before
            table.node[state][better] = v
        for v, span in sorted(pinned.items(), key=lambda item: item[1].start):
            values[span.end] = combine(values[span.start], costs[v, span.start, span.end])
    return table


def _final_states(states: States, values: Array, spare: bool) -> list[int]:
    """The states to choose from: all of one size, all of the same best value."""
    possible = [s for s, value in enumerate(values) if value < np.inf]
    if not possible:
        return []
    if spare:
        best = min(values[s] for s in possible)
        possible = [s for s in possible if values[s] == best]
    size = max(states.sizes[s] for s in possible)
    possible = [s for s in possible if states.sizes[s] == size]
    best = min(values[s] for s in possible)
    return [s for s in possible if values[s] == best]


def _trace(table: Table, pinned: Mapping[int, Span], state: int) -> list[Run]:
    """The runs that led to a state, first to last."""
    ends = {span.end: (v, span.start) for v, span in pinned.items()}
    runs: list[Run] = []
    end = table.values.shape[1] - 1
    while end > 0:
        if end in ends:
            v, start = ends[end]
            before = state
        else:
            v, start = int(table.node[state, end]), int(table.start[state, end])
            before = int(table.before[state, end])
        runs.append((v, start, end))
        state, end = before, start
    return runs[::-1]
