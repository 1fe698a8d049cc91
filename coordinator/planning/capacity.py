"""The capacity of a plan: the sequences, tokens and prefix entries that the memory of its stages can hold.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planning.plan import ModelCosts, StagePlan
from proto.errors import MemoryLimitError
from proto.span import Span
from proto.terminal.progress import format_size

STATES_PER_SEQUENCE = 3
"""GDN states of a sequence at once: the present one, the snapshot of an open window, and the one a step computes."""

PREFIX_SHARE = 0.25
"""Fraction of a stage's free memory that the prefix cache may use, unless the user disables it."""

ROOMY_TOKENS = 4096
"""Tokens of K/V that each sequence should have. With less per sequence, a plan serves fewer sequences."""

FEWEST_TOKENS = 256
"""Tokens of K/V below which a plan is refused: no useful request would fit."""

DEFAULT_SEQUENCES = 16
"""Sequences served at once by default; further requests wait in the queue."""

QUEUED_PER_SEQUENCE = 16
"""Requests that may wait for each sequence served at once, unless the user sets the queue length."""

FEWEST_QUEUED, MOST_QUEUED = 16, 256
"""Requests. Bounds of the queue length: a client would give up before a longer queue reached it."""

MOST_RESERVED = 256 * 2**20
"""Bytes. Upper bound of the memory kept free for activations: a 512-token chunk of a 27B model needs about 100 MB."""

LEAST_RESERVED = 16 * 2**20
"""Bytes. Lower bound of the memory kept free for activations, for small models."""


def reserve_bytes(model: ModelCosts) -> int:
    """Return the bytes that every stage keeps free for activations; they grow with the size of the model."""
    weights = sum(layer.weight_bytes for layer in model.layers)
    return min(MOST_RESERVED, LEAST_RESERVED + weights // 4)


def free_bytes(model: ModelCosts, stage: StagePlan) -> int:
    """Return the bytes of a stage for K/V, states and prefix entries; negative when the weights exceed the limit."""
    return stage.memory_limit - stage.weight_bytes - reserve_bytes(model)


@dataclass(frozen=True)
class Capacity:
    """The load that every stage can hold: `kv_tokens` over at most `sequences` sequences.

    `prefix_bytes` is the size of each stage's prefix cache. `token_bytes` (K/V of a token) and `state_bytes` (GDN
    states and the hidden states that wait for the head) describe a prefix entry; each is the maximum over the stages.
    """

    sequences: int
    kv_tokens: int
    prefix_bytes: int
    token_bytes: int = 0
    state_bytes: int = 0

    @property
    def queue(self) -> int:
        """Requests that may wait; in a longer queue requests would wait longer than clients do."""
        return min(MOST_QUEUED, max(FEWEST_QUEUED, QUEUED_PER_SEQUENCE * self.sequences))

    def entry_bytes(self, tokens: int) -> int:
        """Return an upper bound of the bytes that a prefix entry of `tokens` tokens takes on any stage."""
        return tokens * self.token_bytes + self.state_bytes


def whole_model_capacity(
    costs: ModelCosts, name: str, limit: int, context: int, wanted: int, prefix_cache: bool = True
) -> Capacity:
    """Return the capacity of a machine `name` that holds the whole model in `limit` bytes. See `plan_capacity`."""
    weights = sum(layer.weight_bytes for layer in costs.layers)
    weights += costs.embed_bytes + costs.last_stage_bytes
    whole = Span(0, len(costs.layers))
    stage = StagePlan(name, whole, True, True, weights, 0, limit, 0.0)
    return plan_capacity(costs, [stage], context, wanted, prefix_cache)


def plan_capacity(
    costs: ModelCosts,
    stages: Sequence[StagePlan],
    context: int,
    wanted: int,
    prefix_cache: bool = True,
) -> Capacity:
    """Return the largest capacity that fits every stage, for up to `wanted` sequences of up to `context` tokens.

    Without `prefix_cache` the memory of prefix entries is used for K/V. When memory is short, the number of
    sequences shrinks before the context of a single sequence does. Raises MemoryLimitError when not one short
    sequence fits.
    """
    prefix_share = PREFIX_SHARE if prefix_cache else 0.0
    tokens_of = {
        count: min(_kv_tokens(costs, stage, count, 1 - prefix_share) for stage in stages)
        for count in range(1, wanted + 1)
    }
    fitting = [n for n, tokens in tokens_of.items() if tokens >= min(context, ROOMY_TOKENS * n)]
    sequences = max(fitting, default=1)
    if tokens_of[sequences] < FEWEST_TOKENS:
        tight = min(stages, key=lambda stage: free_bytes(costs, stage))
        raise MemoryLimitError(
            f"{tight.node} has {format_size(max(0, free_bytes(costs, tight)))} left beside its weights, too little "
            "for one sequence. Give it fewer layers or a larger --memory-limit."
        )
    return Capacity(
        sequences,
        min(tokens_of[sequences], context * sequences),
        prefix_bytes=max(0, min(int(free_bytes(costs, stage) * prefix_share) for stage in stages)),
        token_bytes=max(_token_bytes(costs, stage) for stage in stages),
        state_bytes=max(_state_bytes(costs, stage) for stage in stages),
    )


def _kv_tokens(costs: ModelCosts, stage: StagePlan, sequences: int, share: float) -> int:
    """Return the tokens of K/V that fit into `share` of the free memory beside the states of `sequences`."""
    states = _state_bytes(costs, stage) * sequences * STATES_PER_SEQUENCE
    left = int(free_bytes(costs, stage) * share) - states
    per_token = _token_bytes(costs, stage)
    if left <= 0:
        return 0
    return left // per_token if per_token else 2**62


def _token_bytes(costs: ModelCosts, stage: StagePlan) -> int:
    own = sum(costs.layers[layer].kv_bytes for layer in stage.span)
    return own + (costs.head_kv_bytes if stage.last else 0)


def _state_bytes(costs: ModelCosts, stage: StagePlan) -> int:
    own = sum(costs.layers[layer].state_bytes for layer in stage.span)
    return own + (costs.head_state_bytes if stage.last else 0)
