"""How much a plan can serve at once: what the stages' memory leaves for K/V, states and prefix entries. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.plan import ModelCosts
from proto.errors import MemoryLimitError
from proto.size import format_size
from proto.span import Span

STATES_A_SEQUENCE = 3
"""Of a GDN state: the present one, the snapshot of an open window, and the one a step is computing."""

PREFIX_SHARE = 0.25
"""Of what is left beside weights, for prefix entries."""

DEFAULT_SEQUENCES = 16
"""Served at once when nobody says otherwise; more wait in the queue."""

MOST_RESERVED = 256 * 2**20
LEAST_RESERVED = 16 * 2**20
"""Kept free on every stage for activations: a 512-token chunk of a 27B model needs about 100 MB, of a tiny one a few."""


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
    """`kv_tokens` over at most `sequences` sequences, and `prefix_bytes` a stage: what every stage has room for."""

    sequences: int
    kv_tokens: int
    prefix_bytes: int


def capacity(costs: ModelCosts, rooms: Sequence[Room], context: int, wanted: int) -> Capacity:
    """The most that fits on every stage, for up to `wanted` sequences of up to `context` tokens.

    Sequences are given up before a single one's context is. Raises MemoryLimitError when not one short sequence fits.
    """
    for sequences in range(wanted, 0, -1):
        tokens = min(_kv_tokens(costs, room, sequences) for room in rooms)
        if tokens >= min(context, 4096 * sequences):
            prefix = min(int(room.free * PREFIX_SHARE) for room in rooms)
            return Capacity(sequences, min(tokens, context * sequences), max(0, prefix))
    tokens = min(_kv_tokens(costs, room, 1) for room in rooms)
    if tokens < 256:
        tight = min(rooms, key=lambda room: room.free)
        raise MemoryLimitError(
            f"{tight.name} has {format_size(max(0, tight.free))} left beside its weights, too little for one "
            "sequence: give it fewer layers or more --memory-limit"
        )
    return Capacity(1, tokens, 0)


def _kv_tokens(costs: ModelCosts, room: Room, sequences: int) -> int:
    """Tokens of K/V a stage has room for beside the states of so many sequences."""
    layers = [costs.layers[layer] for layer in room.span]
    states = sum(layer.state_bytes for layer in layers) * sequences * STATES_A_SEQUENCE
    a_token = sum(layer.kv_bytes for layer in layers) + (costs.head_kv_bytes if room.last else 0)
    left = int(room.free * (1 - PREFIX_SHARE)) - states
    if left <= 0:
        return 0
    return left // a_token if a_token else 2**62
