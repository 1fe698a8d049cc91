"""The exact search for the order of the nodes and the layers of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from proto.span import Span

Array = npt.NDArray[np.float64]
Run = tuple[int, int, int]
"""A run of layers: index of the node, first layer, and end (exclusive)."""

MAX_STATES = 1024
"""States. A step takes about 20 µs at 64 layers, so ten different nodes in any order take 0.1 s."""


@dataclass(frozen=True)
class States:
    """The states of the search. A state comes after every state that leads to it.

    `steps[s]` are the pairs (state before, node added) that lead to state s. `sizes[s]` counts the nodes of state s.
    State 0 has none.
    """

    steps: tuple[tuple[tuple[int, int], ...], ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """The best values of each state, `[states, layers + 1]`, and the step that each value came from."""

    values: Array
    before: npt.NDArray[np.int64]
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
    states = list_states(costs, free)
    values = _search(states, costs, pinned, np.maximum).values[:, -1]
    possible = [s for s, value in enumerate(values) if value < np.inf]
    if not possible:
        return None
    size = max(states.sizes[s] for s in possible)
    best = min(values[s] for s in possible if states.sizes[s] == size)
    chosen = [s for s in possible if states.sizes[s] == size and values[s] == best]
    allowed = np.where(costs <= best, costs**2, np.inf)
    table = _search(states, allowed, pinned, np.add)
    return _trace(table, pinned, min(chosen, key=lambda s: table.values[s, -1]))


def _around(costs: Array, pinned: Mapping[int, Span], free: Sequence[int]) -> Array:
    """Return `costs` with inf for every run of a free node that contains a pinned layer."""
    costs = costs.copy()
    starts, ends = np.indices(costs.shape[1:])
    for span in pinned.values():
        costs[np.ix_(free)] = np.where(
            (starts < span.end) & (ends > span.start), np.inf, costs[np.ix_(free)]
        )
    return costs


def list_states(costs: Array, free: Sequence[int]) -> States:
    """Return the sets of free nodes as states, or the prefixes of the order given when the sets are too many."""
    equal: dict[bytes, list[int]] = {}
    for v in free:
        equal.setdefault(costs[v].tobytes(), []).append(v)
    count = 1
    for nodes in equal.values():
        count *= len(nodes) + 1
    if count > MAX_STATES:
        return _ordered_states(free)
    earlier = {v: nodes[:i] for nodes in equal.values() for i, v in enumerate(nodes)}
    return _set_states(free, earlier)


def _set_states(free: Sequence[int], earlier: Mapping[int, Sequence[int]]) -> States:
    """Return every set of nodes that contains, with a node, the equal nodes `earlier` in the order."""
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
    """Return the states of the order given: pairs (number of nodes placed, index of the last)."""
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


def _search(states: States, costs: Array, pinned: Mapping[int, Span], combine: np.ufunc) -> Table:
    """Fill the table, state by state."""
    shape = (len(states.steps), costs.shape[1])
    table = Table(np.full(shape, np.inf), *(np.full(shape, -1, np.int64) for _ in range(3)))
    for state, steps in enumerate(states.steps):
        values = table.values[state]
        if state == 0:
            values[0] = 0.0
        for before, v in steps:
            candidates = combine(table.values[before][:, None], costs[v])
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


def _trace(table: Table, pinned: Mapping[int, Span], state: int) -> list[Run]:
    """Return the runs that led to `state`, first to last."""
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
