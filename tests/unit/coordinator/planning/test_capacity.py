"""The capacity of a plan: as much as its tightest stage can hold, and never more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.planning.capacity import (
    FEWEST_TOKENS,
    LEAST_RESERVED,
    MOST_RESERVED,
    ROOMY_TOKENS,
    STATES_PER_SEQUENCE,
    StageMemory,
    plan_capacity,
    reserve_bytes,
    stages_capacity,
    whole_model_capacity,
)
from coordinator.planning.plan import LayerCost, ModelCosts, NodeSpec, make_plan
from proto.errors import MemoryLimitError
from proto.span import Span

GDN = LayerCost(weight_bytes=10**6, seconds=1e-3, state_bytes=50_000)
ATTENTION = LayerCost(weight_bytes=10**6, seconds=1e-3, kv_bytes=1000)
MODEL = ModelCosts((GDN, GDN, GDN, ATTENTION) * 2, head_kv_bytes=500)
CONTEXT = 8192


def stages_with(*free: int, model: ModelCosts = MODEL) -> list[StageMemory]:
    """Return stages of equal spans, each with the bytes free that `free` lists."""
    each = len(model.layers) // len(free)
    return [
        StageMemory(
            f"node {i}",
            Span(i * each, (i + 1) * each),
            last=i == len(free) - 1,
            limit=bytes_free + 10**6 + 1000,
            weights=10**6,
            reserve=1000,
        )
        for i, bytes_free in enumerate(free)
    ]


def used(stage: StageMemory, sequences: int, tokens: int, model: ModelCosts = MODEL) -> int:
    """Return the bytes of K/V and states on `stage`, counted from the definition."""
    layers = [model.layers[i] for i in stage.span]
    per_token = sum(layer.kv_bytes for layer in layers) + stage.last * model.head_kv_bytes
    states = sum(layer.state_bytes for layer in layers)
    return tokens * per_token + sequences * STATES_PER_SEQUENCE * states


def test_plenty_of_memory_serves_all_that_is_wanted_at_full_context() -> None:
    """The capacity is bounded by what can be used: every sequence at its whole context."""
    found = stages_capacity(MODEL, stages_with(10**12, 10**12), CONTEXT, wanted=16)
    assert (found.sequences, found.kv_tokens) == (16, 16 * CONTEXT)


def test_the_tightest_stage_decides() -> None:
    """The stage with the least free memory bounds the capacity, wherever it lies."""
    tight = stages_capacity(MODEL, stages_with(10**12, 40 * 10**6), CONTEXT, 16)
    assert tight == stages_capacity(MODEL, stages_with(50 * 10**6, 40 * 10**6), CONTEXT, 16)
    assert tight.kv_tokens < 16 * CONTEXT


def test_the_last_stage_pays_for_the_heads_keys_and_values() -> None:
    """The K/V of the last stage count the head's beside those of its layers."""
    first, last = stages_with(40 * 10**6, 40 * 10**6)
    for stage, a_token in ((first, 1000), (last, 1500)):
        alone = stages_capacity(MODEL, [stage], 10**6, 1)
        assert alone.token_bytes == a_token
        assert alone.kv_tokens == (30 * 10**6 - STATES_PER_SEQUENCE * 150_000) // a_token


def test_sequences_are_given_up_before_context_is() -> None:
    """With less memory the plan serves fewer sequences, each with its whole context, down to one sequence."""
    counts = []
    for megabytes in (400, 100, 60, 20, 10, 5):
        found = stages_capacity(MODEL, stages_with(megabytes * 10**6), CONTEXT, 16)
        counts.append(found.sequences)
        if found.sequences > 1:
            assert found.kv_tokens >= min(CONTEXT, ROOMY_TOKENS * found.sequences)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 16
    assert counts[-1] == 1


def test_the_capacity_of_a_plan_is_that_of_its_stages() -> None:
    """A plan's stages count with their limit, their weights, the reserve and the head on the last one."""
    nodes = [NodeSpec("a", 10**8), NodeSpec("b", 10**8)]
    plan = make_plan(MODEL, nodes)
    reserve = reserve_bytes(MODEL)
    stages = [
        StageMemory("a", Span(0, 4), False, 10**8, 4 * 10**6, reserve),
        StageMemory("b", Span(4, 8), True, 10**8, 4 * 10**6, reserve),
    ]
    assert plan_capacity(MODEL, plan, CONTEXT, 16) == stages_capacity(MODEL, stages, CONTEXT, 16)


def test_the_weights_of_another_plan_take_room() -> None:
    """Beside the stages of another model, each machine has the room that its weights there leave."""
    plan = make_plan(MODEL, [NodeSpec("a", 10**8), NodeSpec("b", 10**8)])
    other = make_plan(MODEL, [NodeSpec("b", 10**8), NodeSpec("c", 10**8)])
    less = replace(plan.stages[1], memory_limit=10**8 - other.stages[0].weight_bytes)
    expected = plan_capacity(MODEL, replace(plan, stages=(plan.stages[0], less)), CONTEXT, 16)
    assert plan_capacity(MODEL, plan, CONTEXT, 16, beside=other) == expected
    assert expected.prefix_bytes < plan_capacity(MODEL, plan, CONTEXT, 16).prefix_bytes


def test_the_capacity_of_one_machine_counts_every_weight() -> None:
    """A machine that holds the whole model pays for the layers, the embedding and the last stage's parts."""
    model = replace(MODEL, embed_bytes=10**6, last_stage_bytes=10**6)
    stage = StageMemory("m", Span(0, 8), True, 10**8, 10**7, reserve_bytes(model))
    found = whole_model_capacity(model, "m", 10**8, CONTEXT, 16)
    assert found == stages_capacity(model, [stage], CONTEXT, 16)


def test_too_little_for_one_names_the_stage() -> None:
    """The error names the stage and the flag to change."""
    with pytest.raises(MemoryLimitError, match=r"node 1 has .* left .*--memory-limit"):
        stages_capacity(MODEL, stages_with(10**9, 600_000), CONTEXT, 16)
    with pytest.raises(MemoryLimitError, match="node 0 has 0 B left"):
        stages_capacity(MODEL, stages_with(-5), CONTEXT, 16)


def test_without_a_prefix_cache_its_share_is_for_keys_and_values() -> None:
    """Without a prefix cache its share of the memory is used for K/V."""
    stages = stages_with(40 * 10**6, 40 * 10**6)
    with_cache = stages_capacity(MODEL, stages, 10**6, 1)
    without = stages_capacity(MODEL, stages, 10**6, 1, prefix_cache=False)
    assert with_cache.prefix_bytes == 10**7
    assert without.prefix_bytes == 0
    assert without.kv_tokens - with_cache.kv_tokens == 10**7 // 1500


def test_a_stage_without_attention_limits_no_tokens() -> None:
    """GDN states have a constant size, so a stage of GDN layers alone never bounds the tokens."""
    model = replace(MODEL, layers=(GDN,) * 4, head_kv_bytes=0)
    found = stages_capacity(model, stages_with(10**9, 10**9, model=model), CONTEXT, 4)
    assert (found.sequences, found.kv_tokens) == (4, 4 * CONTEXT)
    assert found.entry_bytes(1000) == found.entry_bytes(1) == 100_000


def test_entries_are_counted_on_the_stage_where_they_are_largest() -> None:
    """K/V and states may be largest on different stages; the sum of both maxima is an upper bound."""
    model = replace(MODEL, layers=(GDN, GDN, ATTENTION, ATTENTION))
    found = stages_capacity(model, stages_with(10**9, 10**9, model=model), CONTEXT, 4)
    assert found.entry_bytes(100) == 100 * 2500 + 100_000


def test_the_reserve_grows_with_the_model_within_bounds() -> None:
    """The reserve grows with the weights between its two bounds."""
    tiny = replace(MODEL, layers=(replace(GDN, weight_bytes=0),))
    large = replace(MODEL, layers=(replace(GDN, weight_bytes=10**11),))
    assert reserve_bytes(tiny) == LEAST_RESERVED
    assert LEAST_RESERVED < reserve_bytes(MODEL) < MOST_RESERVED
    assert reserve_bytes(large) == MOST_RESERVED


@given(
    st.sampled_from([1, 2, 4]).flatmap(
        lambda n: st.lists(st.integers(10**6, 2 * 10**8), min_size=n, max_size=n)
    ),
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
        found = stages_capacity(MODEL, stages, context, wanted, prefix_cache)
    except MemoryLimitError:
        assume(False)
    assert 1 <= found.sequences <= wanted
    assert FEWEST_TOKENS <= found.kv_tokens <= context * found.sequences
    for stage in stages:
        assert used(stage, found.sequences, found.kv_tokens) + found.prefix_bytes <= stage.free
