"""The capacity of a plan: as much as its tightest stage can hold, and never more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.planning import capacity
from coordinator.planning.plan import LayerCost, ModelCosts, StagePlan
from proto.errors import MemoryLimitError
from proto.span import Span

GDN = LayerCost(weight_bytes=10**6, seconds=1e-3, state_bytes=50_000)
ATTENTION = LayerCost(weight_bytes=10**6, seconds=1e-3, kv_bytes=1000)
MODEL = ModelCosts((GDN, GDN, GDN, ATTENTION) * 2, head_kv_bytes=500)
CONTEXT = 8192


def stages_with(*free: int, model: ModelCosts = MODEL) -> list[StagePlan]:
    """Return stages of equal spans, each with the bytes free that `free` lists."""
    each = len(model.layers) // len(free)
    return [
        StagePlan(
            f"node {i}",
            Span(i * each, (i + 1) * each),
            first=i == 0,
            last=i == len(free) - 1,
            weight_bytes=10**6,
            cache_bytes=0,
            memory_limit=bytes_free + 10**6 + capacity.reserve_bytes(model),
            predicted_seconds=0.0,
        )
        for i, bytes_free in enumerate(free)
    ]


def used(stage: StagePlan, sequences: int, tokens: int, model: ModelCosts = MODEL) -> int:
    """Return the bytes of K/V and states on `stage`, counted from the definition."""
    layers = [model.layers[i] for i in stage.span]
    per_token = sum(layer.kv_bytes for layer in layers) + stage.last * model.head_kv_bytes
    states = sum(layer.state_bytes for layer in layers)
    return tokens * per_token + sequences * capacity.STATES_PER_SEQUENCE * states


def test_sequences_are_given_up_before_context_is() -> None:
    """With less memory the plan serves fewer sequences, each with its whole context, down to one sequence."""
    counts = []
    for megabytes in (400, 100, 60, 20, 10, 5):
        found = capacity.plan_capacity(MODEL, stages_with(megabytes * 10**6), CONTEXT, 16)
        counts.append(found.sequences)
        if found.sequences > 1:
            assert found.kv_tokens >= min(CONTEXT, capacity.ROOMY_TOKENS * found.sequences)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 16
    assert counts[-1] == 1


def test_too_little_for_one_names_the_stage() -> None:
    """The error names the stage and the flag to change."""
    with pytest.raises(MemoryLimitError, match=r"node 1 has .* left .*--memory-limit"):
        capacity.plan_capacity(MODEL, stages_with(10**9, 600_000), CONTEXT, 16)
    with pytest.raises(MemoryLimitError, match="node 0 has 0 B left"):
        capacity.plan_capacity(MODEL, stages_with(-5), CONTEXT, 16)


def test_the_reserve_grows_with_the_model_within_bounds() -> None:
    """The reserve grows with the weights between its two bounds."""
    tiny = replace(MODEL, layers=(replace(GDN, weight_bytes=0),))
    large = replace(MODEL, layers=(replace(GDN, weight_bytes=10**11),))
    assert capacity.reserve_bytes(tiny) == capacity.LEAST_RESERVED
    assert capacity.LEAST_RESERVED < capacity.reserve_bytes(MODEL) < capacity.MOST_RESERVED
    assert capacity.reserve_bytes(large) == capacity.MOST_RESERVED


@given(
    st.sampled_from([1, 2, 4]).flatmap(lambda n: st.lists(st.integers(10**6, 2 * 10**8), min_size=n, max_size=n)),
    st.integers(1, 12),
    st.sampled_from([512, 8192, 262_144]),
    st.booleans(),
)
def test_nothing_promised_exceeds_any_stages_memory(
    free: list[int], wanted: int, context: int, prefix_cache: bool
) -> None:
    """All sequences, tokens and prefix entries together fit into the free memory of every stage."""
    stages = stages_with(*free)
    try:
        found = capacity.plan_capacity(MODEL, stages, context, wanted, prefix_cache)
    except MemoryLimitError:
        assume(False)
    assert 1 <= found.sequences <= wanted
    assert capacity.FEWEST_TOKENS <= found.kv_tokens <= context * found.sequences
    for stage in stages:
        assert used(stage, found.sequences, found.kv_tokens) + found.prefix_bytes <= capacity.free_bytes(MODEL, stage)
