"""How much a plan can serve at once: what the stages' memory leaves for K/V, states and prefix entries. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planning.plan import ModelCosts
from proto.errors import MemoryLimitError
from proto.span import Span
from proto.terminal.size import format_size

STATES_A_SEQUENCE = 3
"""Of a GDN state: the present one, the snapshot of an open window, and the one a step is computing."""

PREFIX_SHARE = 0.25
"""Of what is left beside weights, for prefix entries, unless the user wants none."""

ROOMY_TOKENS = 4096
"""K/V each sequence should find; where there is less, fewer are served at once."""

FEWEST_TOKENS = 256
"""A plan with less K/V in all serves nobody."""

DEFAULT_SEQUENCES = 16
"""Served at once when nobody says otherwise; more wait in the queue."""

QUEUED_A_SEQUENCE = 16
FEWEST_QUEUED, MOST_QUEUED = 16, 256
"""Requests that may wait for each one that is served, and in all, unless the user says how many."""

MOST_RESERVED = 256 * 2**20
LEAST_RESERVED = 16 * 2**20
"""Kept free on every stage for activations: a 512-token chunk of a 27B model needs about 100 MB."""


def reserve_bytes(model: ModelCosts) -> int:
    """Bytes every stage keeps free, by the size of the model."""
    weights = sum(layer.weight_bytes for layer in model.layers)
    return min(MOST_RESERVED, LEAST_RESERVED + weights // 4)


@dataclass(frozen=True)
class Room:
    """A stage's memory, in bytes: `limit` in all, of which `weights` and a reserve are taken."""

    name: str
    span: Span
    last: bool
    limit: int
    weights: int
    reserve: int

    @property
    def free(self) -> int:
        return self.limit - self.weights - self.reserve


@dataclass(frozen=True)
class Capacity:
    """`kv_tokens` over at most `sequences` sequences, and `prefix_bytes` a stage: what every stage has room for.

    `token_bytes` of K/V, and `state_bytes` of GDN states and of what waits for the head, are those of a prefix entry on
    the stage where they are most.
    """

    sequences: int
    kv_tokens: int
    prefix_bytes: int
    token_bytes: int = 0
    state_bytes: int = 0

    @property
    def queue(self) -> int:
        """Requests that may wait: more would wait longer than clients do."""
        return min(MOST_QUEUED, max(FEWEST_QUEUED, QUEUED_A_SEQUENCE * self.sequences))

    def entry_bytes(self, tokens: int) -> int:
        """Of a prefix entry of so many tokens, on the stage where it is largest; no less than it will be."""
        return tokens * self.token_bytes + self.state_bytes


def capacity(
    costs: ModelCosts,
    rooms: Sequence[Room],
    context: int,
    wanted: int,
    prefix_cache: bool = True,
) -> Capacity:
    """The most that fits on every stage, for up to `wanted` sequences of up to `context` tokens.

    Without `prefix_cache` what its entries would take is for K/V. Sequences are given up before a single one's
    context is. Raises MemoryLimitError when not one short sequence fits.
    """
    prefix_share = PREFIX_SHARE if prefix_cache else 0.0
    tokens_of = {
        n: min(_kv_tokens(costs, r, n, 1 - prefix_share) for r in rooms)
        for n in range(1, wanted + 1)
    }
    fitting = [n for n, t in tokens_of.items() if t >= min(context, ROOMY_TOKENS * n)]
    sequences = max(fitting, default=1)
    if tokens_of[sequences] < FEWEST_TOKENS:
        tight = min(rooms, key=lambda room: room.free)
        raise MemoryLimitError(
            f"{tight.name} has {format_size(max(0, tight.free))} left beside its weights, too little for one "
            "sequence: give it fewer layers or more --memory-limit"
        )
    return Capacity(
        sequences,
        min(tokens_of[sequences], context * sequences),
        prefix_bytes=max(0, min(int(room.free * prefix_share) for room in rooms)),
        token_bytes=max(_token_bytes(costs, room) for room in rooms),
        state_bytes=max(_state_bytes(costs, room) for room in rooms),
    )


def _kv_tokens(costs: ModelCosts, room: Room, sequences: int, share: float) -> int:
    """Tokens of K/V that fit into `share` of a stage's free memory beside the states of so many sequences."""
    states = _state_bytes(costs, room) * sequences * STATES_A_SEQUENCE
    left = int(room.free * share) - states
    a_token = _token_bytes(costs, room)
    if left <= 0:
        return 0
    return left // a_token if a_token else 2**62


def _token_bytes(costs: ModelCosts, room: Room) -> int:
    own = sum(costs.layers[layer].kv_bytes for layer in room.span)
    return own + (costs.head_kv_bytes if room.last else 0)


def _state_bytes(costs: ModelCosts, room: Room) -> int:
    own = sum(costs.layers[layer].state_bytes for layer in room.span)
    return own + (costs.head_state_bytes if room.last else 0)
