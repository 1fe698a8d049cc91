"""What a plan can serve at once: as much as the tightest stage has room for, never more."""

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
    STATES_A_SEQUENCE,
    Room,
    capacity,
    reserve_bytes,
)
from coordinator.planning.plan import LayerCost, ModelCosts
from proto.errors import MemoryLimitError
from proto.span import Span

GDN = LayerCost(weight_bytes=10**6, seconds=1e-3, state_bytes=50_000)
ATTENTION = LayerCost(weight_bytes=10**6, seconds=1e-3, kv_bytes=1000)
MODEL = ModelCosts((GDN, GDN, GDN, ATTENTION) * 2, head_kv_bytes=500)
CONTEXT = 8192


def rooms(*free: int, model: ModelCosts = MODEL) -> list[Room]:
    """Stages of equal spans with so many bytes free."""
    each = len(model.layers) // len(free)
    return [
        Room(
            f"node {i}",
            Span(i * each, (i + 1) * each),
            last=i == len(free) - 1,
            limit=bytes_free + 10**6 + 1000,
            weights=10**6,
            reserve=1000,
        )
        for i, bytes_free in enumerate(free)
    ]


def used(room: Room, sequences: int, tokens: int, model: ModelCosts = MODEL) -> int:
    """Bytes of K/V and states on a stage that serves so much, counted plainly."""
    layers = [model.layers[i] for i in room.span]
    per_token = sum(layer.kv_bytes for layer in layers) + room.last * model.head_kv_bytes
    states = sum(layer.state_bytes for layer in layers)
    return tokens * per_token + sequences * STATES_A_SEQUENCE * states


def test_plenty_of_memory_serves_all_that_is_wanted_at_full_context() -> None:
    """No more is promised than could be used: every sequence at its whole context."""
    found = capacity(MODEL, rooms(10**12, 10**12), CONTEXT, wanted=16)
    assert (found.sequences, found.kv_tokens) == (16, 16 * CONTEXT)


def test_the_tightest_stage_decides() -> None:
    """Whichever it is."""
    tight = capacity(MODEL, rooms(10**12, 40 * 10**6), CONTEXT, 16)
    assert tight == capacity(MODEL, rooms(50 * 10**6, 40 * 10**6), CONTEXT, 16)
    assert tight.kv_tokens < 16 * CONTEXT


def test_the_last_stage_pays_for_the_heads_keys_and_values() -> None:
    """Its K/V a token are more than its layers'."""
    first, last = rooms(40 * 10**6, 40 * 10**6)
    for room, a_token in ((first, 1000), (last, 1500)):
        alone = capacity(MODEL, [room], 10**6, 1)
        assert alone.token_bytes == a_token
        assert alone.kv_tokens == (30 * 10**6 - STATES_A_SEQUENCE * 150_000) // a_token


def test_sequences_are_given_up_before_context_is() -> None:
    """With less memory fewer are served at once, as long as one of them finds its whole context; then one is left."""
    counts = []
    for megabytes in (400, 100, 60, 20, 10, 5):
        found = capacity(MODEL, rooms(megabytes * 10**6), CONTEXT, 16)
        counts.append(found.sequences)
        if found.sequences > 1:
            assert found.kv_tokens >= min(CONTEXT, ROOMY_TOKENS * found.sequences)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 16
    assert counts[-1] == 1


def test_too_little_for_one_names_the_stage() -> None:
    """And what to do."""
    with pytest.raises(MemoryLimitError, match=r"node 1 has .* left .*--memory-limit"):
        capacity(MODEL, rooms(10**9, 600_000), CONTEXT, 16)
    with pytest.raises(MemoryLimitError, match="node 0 has 0 B left"):
        capacity(MODEL, rooms(-5), CONTEXT, 16)


def test_without_a_prefix_cache_its_share_is_for_keys_and_values() -> None:
    """Nothing is set aside for entries that are never made."""
    stages = rooms(40 * 10**6, 40 * 10**6)
    with_cache = capacity(MODEL, stages, 10**6, 1)
    without = capacity(MODEL, stages, 10**6, 1, prefix_cache=False)
    assert with_cache.prefix_bytes == 10**7
    assert without.prefix_bytes == 0
    assert without.kv_tokens - with_cache.kv_tokens == 10**7 // 1500


def test_a_stage_without_attention_limits_no_tokens() -> None:
    """Its states are of one size however long the text: a stage of GDN layers alone gives what the context asks."""
    model = replace(MODEL, layers=(GDN,) * 4, head_kv_bytes=0)
    found = capacity(model, rooms(10**9, 10**9, model=model), CONTEXT, 4)
    assert (found.sequences, found.kv_tokens) == (4, 4 * CONTEXT)
    assert found.entry_bytes(1000) == found.entry_bytes(1) == 100_000


def test_entries_are_counted_on_the_stage_where_they_are_largest() -> None:
    """Their K/V and their states may be largest on different stages: the count is never below the truth."""
    model = replace(MODEL, layers=(GDN, GDN, ATTENTION, ATTENTION))
    found = capacity(model, rooms(10**9, 10**9, model=model), CONTEXT, 4)
    assert found.entry_bytes(100) == 100 * 2500 + 100_000


def test_the_reserve_grows_with_the_model_within_bounds() -> None:
    """Activations of a small model are small, those of a large one no larger than seen."""
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
    """All sequences, all tokens and all prefix entries together fit into what every stage has free."""
    stages = rooms(*free)
    try:
        found = capacity(MODEL, stages, context, wanted, prefix_cache)
    except MemoryLimitError:
        assume(False)
    assert 1 <= found.sequences <= wanted
    assert FEWEST_TOKENS <= found.kv_tokens <= context * found.sequences
    for room in stages:
        assert used(room, found.sequences, found.kv_tokens) + found.prefix_bytes <= room.free
