"""The costs of a model's layers, and the capacity of a plan: its sequences, tokens and prefix entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planning.plan import LayerCost, ModelCosts, StagePlan
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.cut import Cut
from mtp.checkpoint.format.shard import TensorInfo
from mtp.head.draft_vocabulary import drafted_share
from mtp.head.drafter import MOST_WAITING
from proto.errors import MemoryLimitError
from proto.terminal.progress import format_size
from proto.wire import DTYPE_BYTES, STORED_BYTES, STORED_NAMES

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
"""Requests that may wait for each sequence served at once."""

MOST_QUEUED = 256
"""Requests. Bound of the queue length: a client would give up before a longer queue reached it."""

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
        return min(MOST_QUEUED, QUEUED_PER_SEQUENCE * self.sequences)

    def entry_bytes(self, tokens: int) -> int:
        """Return an upper bound of the bytes that a prefix entry of `tokens` tokens takes on any stage."""
        return tokens * self.token_bytes + self.state_bytes


def plan_capacity(
    costs: ModelCosts,
    stages: Sequence[StagePlan],
    context: int,
    wanted: int,
    prefix_cache: bool = True,
) -> Capacity:
    """Return the largest capacity that fits every stage, for up to `wanted` sequences of up to `context` tokens.

    Without `prefix_cache` K/V takes the memory of prefixes. The number of sequences shrinks before the context of one.
    Raises MemoryLimitError when not one short sequence fits.
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
    states = _state_bytes(costs, stage) * (sequences * STATES_PER_SEQUENCE + 1)  # one for a backup
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


REFERENCE_BANDWIDTH = 100e9
"""Bytes per second. Memory bandwidth of a node of speed 1, as an M1 or M2 has it; an M4 has 1.2 times as much."""

EXPERT_SHARE = 0.83
"""The part of the speed of other reads that the experts of a token reach. The published speeds of MiniMax-M2.5 and
Qwen3-Coder-480B on an M3 Ultra have it: their layers differ little besides the bytes of their experts."""

READ_TOKENS = 2000
"""Tokens whose K/V is read for each predicted token, as in a short conversation."""

_FLOATS = {"F64", *STORED_NAMES.values()}


def model_costs(
    checkpoint: Checkpoint,
    *,
    dtype: str | None = None,
    kv_bits: int | None = None,
    with_head: bool = True,
    draft_vocab: bytes = b"",
) -> ModelCosts:
    """Return the costs of `checkpoint` as `dtype` (None: as stored), `with_head` those of a complete MTP head too.

    The head drafts the tokens of the bitmap `draft_vocab`, whose rows of lm_head it holds a second time.
    """
    config = checkpoint.config
    sizes = {part: _part_bytes(checkpoint, part, dtype) for part in checkpoint.plans}
    tied = config.tie_word_embeddings
    head = with_head and checkpoint.mtp.complete
    lm_head, lm_head_active = sizes["embed" if tied else "lm_head"]
    norm = checkpoint.norm_type
    stored = STORED_BYTES[norm] if norm in _FLOATS else 4
    itemsize = DTYPE_BYTES[dtype] if dtype else stored
    kv_format = config.kv_format(kv_bits)
    layers = []
    for number, layer in enumerate(config.shape.layers):
        total, active = sizes[f"layers.{number}"]
        kv, state = layer.token_bytes(itemsize, kv_format), layer.sequence_bytes(itemsize)
        layers.append(LayerCost(total, (active + kv * READ_TOKENS) / REFERENCE_BANDWIDTH, kv, state))
    head_kv = config.shape.head.token_bytes(itemsize, kv_format) if head and config.shape.head else 0
    last = sizes["norm"][0] + (0 if tied else lm_head) + (sizes["mtp"][0] if head else 0)
    draft_rows, drafted_active = 0, lm_head_active
    if head and draft_vocab:  # every member of a group has all of them
        whole, _ = _part_bytes(checkpoint.cut_for(Cut(0, 1)), "embed" if tied else "lm_head", dtype)
        draft_rows = drafted_active = int(whole * drafted_share(draft_vocab, config.vocab_size))
    return ModelCosts(
        layers=tuple(layers),
        embed_bytes=sizes["embed"][0],
        last_stage_bytes=last + draft_rows,
        lm_head_seconds=lm_head_active / REFERENCE_BANDWIDTH,
        draft_seconds=(sizes["mtp"][1] + drafted_active) / REFERENCE_BANDWIDTH if head else 0.0,
        head_kv_bytes=head_kv,
        head_state_bytes=MOST_WAITING * config.shape.hop_width * itemsize if head else 0,
        last_stage_needs_embed=head or tied,
        first_layers=1 + max(config.shape.token_layers, default=0),
        launches=config.shape.launches,
        accepted=config.shape.accepted,
    )


def _part_bytes(checkpoint: Checkpoint, part: str, dtype: str | None) -> tuple[int, int]:
    """Return the bytes of a part in memory, and those that one token reads, at the speed of reads besides experts."""
    sizes = {
        name: _loaded_bytes(checkpoint.tensors[name], stored, dtype)
        for name, stored in checkpoint.stored_bytes(part).items()
    }
    routed, share = checkpoint.routed_tensors(part), checkpoint.config.shape.routed_share / EXPERT_SHARE
    return sum(sizes.values()), int(sum(size * (share if name in routed else 1) for name, size in sizes.items()))


def _loaded_bytes(tensor: TensorInfo, stored: int, dtype: str | None) -> int:
    """Return the bytes of `stored` bytes of `tensor` after the cast to `dtype`, which keeps packed integers."""
    if dtype is None or tensor.dtype not in _FLOATS:
        return stored
    return stored // STORED_BYTES[tensor.dtype] * DTYPE_BYTES[dtype]
