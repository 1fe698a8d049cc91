"""Tests of the prefix index: which entries it finds, saves and drops, always within the budget."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.capacity import Capacity
from coordinator.schedule.prefix_cache import BLOCK, KEY_BYTES, SMALLEST_ENTRY, PrefixCache, Tokens, block_keys
from coordinator.text.schemas import Json
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir


def cache(prefix_bytes: int = 10**6, token_bytes: int = 1, state_bytes: int = 0) -> PrefixCache:
    """Return an empty index with the given budget."""
    found = PrefixCache()
    found.reset(Capacity(4, 10**6, prefix_bytes, token_bytes=token_bytes, state_bytes=state_bytes))
    return found


def text(length: int, seed: int = 0) -> Tokens:
    """Return a random prompt."""
    return tuple((seed * 31 + i * i) % 97 for i in range(length))


# ---- finding


def test_the_longest_entry_that_leaves_a_token_to_run() -> None:
    """An entry of the whole prompt is not used, because the last token must be computed for its logits."""
    index = cache()
    long = text(300)
    entries = [index.add_entry(long[:n])[0] for n in (128, 200, 300)]
    for prompt, expected in (
        (long, entries[1]),
        ((*long, 5), entries[2]),
        (long[:200], entries[0]),
        (long[:150], entries[0]),
        (long[:128], None),
        (text(300, seed=1), None),
        ((*long[:199], 96, *long[200:]), entries[0]),
    ):
        assert index.find_entry(prompt) == expected


def test_a_new_plan_holds_nothing() -> None:
    """A new plan has no entries, and numbers of old entries are not used again."""
    index = cache()
    first, _ = index.add_entry(text(200))
    index.reset(index.capacity)
    assert index.find_entry(text(300)) is None
    second, _ = index.add_entry(text(200))
    assert first is not None
    assert second is not None
    assert second.number > first.number


# ---- making


def test_the_least_recently_used_goes_first() -> None:
    """Making room drops the entries that were neither added nor found for longest, and only as many as needed."""
    index = cache(prefix_bytes=600)
    a, b, c = (index.add_entry(text(200, seed))[0] for seed in range(3))
    assert None not in (a, b, c)
    index.find_entry((*text(200, 0), 1))
    new, dropped = index.add_entry(text(200, 3))
    assert b is not None
    assert dropped == [b.number]
    assert new is not None
    assert index.find_entry((*text(200, 1), 1)) is None
    assert index.find_entry((*text(200, 0), 1)) == a


# ---- where


def test_entries_end_near_the_end_of_a_prompt_and_where_prompts_differ() -> None:
    """Both positions are whole blocks, so prompts that differ in their last words share an entry."""
    index = cache()
    system = text(200)
    first, second = (*system, *text(130, 1)), (*system, *text(130, 2))
    assert index.boundaries(first, 0) == [320]
    assert index.boundaries(second, 0) == [192, 320]
    assert index.boundaries(second, 192) == [320]
    assert index.boundaries(second, 320) == []
    assert cache().boundaries(text(320), 0) == [288]  # one token at least is left to run


def test_a_few_tokens_more_than_are_held_are_no_entry() -> None:
    """Prompts that share less than a block more than an entry make no further entry."""
    index = cache()
    first, second = text(330), (*text(290), *text(100, 1))
    assert index.boundaries(first, 0, turn=270) == [270]
    assert index.boundaries(second, 270, turn=380) == [380]
    assert index.boundaries(second, 250, turn=380) == [288, 380]


# ---- costs

SHORT = text(160)
CONTEXT = tuple(i * i % 100_003 for i in range(130_000))


def crowded(entries: int) -> PrefixCache:
    """Return an index with `entries` entries, some of prompts that begin as CONTEXT does, and 64 remembered prompts."""
    index = cache(prefix_bytes=2**60)
    keys = block_keys(CONTEXT)
    blocks = len(SHORT) // BLOCK
    for i in range(entries):
        if i % 1000 == 0:
            index.add_entry(CONTEXT[: 200 + i], keys)
        else:  # keys that need no hashing, since they are as different
            index.add_entry(SHORT, i.to_bytes(KEY_BYTES, "big") * blocks)
    for i in range(64):
        place = 2000 * i + 50
        other = (*CONTEXT[:place], -1 % 2**31, *CONTEXT[place + 1 :])
        index.boundaries(other, 0, 0, block_keys(other, keys[: place // BLOCK * KEY_BYTES]))
    return index


def turn_seconds(index: PrefixCache) -> float:
    """Return the processor time of a further turn of CONTEXT, at best of three."""
    times = []
    for i in range(3):
        prompt = [*CONTEXT[:-1], i]
        started = time.process_time()
        keys = block_keys(prompt)
        found = index.find_entry(prompt, keys)
        index.boundaries(prompt, found.tokens if found else 0, 0, keys)
        index.add_entry(prompt, keys)
        times.append(time.process_time() - started)
    return min(times)


def test_a_long_prompt_costs_the_same_beside_any_number_of_entries() -> None:
    """A prompt of 130,000 tokens is hashed once, whatever is kept."""
    few, many = turn_seconds(crowded(100)), turn_seconds(crowded(100_000))
    assert many < max(0.05, 2 * few)


def test_a_remembered_prompt_takes_half_a_byte_a_token() -> None:
    """The index keeps no tokens of the prompts that it compares with new ones."""
    index = cache()
    index.boundaries([9, *CONTEXT], 0)  # what is made once is not counted
    tracemalloc.start()
    for i in range(4):
        index.boundaries([i, *CONTEXT], 0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 0.7 * 4 * len(CONTEXT)


# ---- chats

OPENING = 9
"""Most tokens of `<|im_start|>assistant` and an empty think block."""

WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"properties": {"city": {}}}},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return the tokenizer of the built-in checkpoint."""
    return Tokenizer.load(checkpoint_dir())


@pytest.mark.parametrize("thinking", [True, False])
def test_the_next_turn_of_a_chat_finds_the_one_before(tokenizer: Tokenizer, thinking: bool) -> None:
    """The next turn finds the entry of the turn before it, at any length.

    The history leaves out only the opening of the answer. The entry at the end of that answer is of no use to the turn.
    """
    for words in range(SMALLEST_ENTRY, SMALLEST_ENTRY + 2 * BLOCK + 1):
        index = cache()
        chat: list[Json] = [{"role": "user", "content": "a " * words}]
        held = 0
        for answer in ("Yes.", "\n\nNo", "  (1)"):
            prompt = tokenizer.chat_prompt(chat, template_kwargs={"enable_thinking": thinking})
            found = index.find_entry(prompt.tokens)
            assert (found.tokens if found else 0) == held
            assert index.boundaries(prompt.tokens, held, prompt.turn) == [prompt.turn]
            index.add_entry(prompt.tokens[: prompt.turn])
            held = prompt.turn
            assert len(prompt.tokens) - OPENING <= held < len(prompt.tokens)
            assert not prompt.continued
            chat += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "Why? " * (words % 7)},
            ]


@pytest.mark.parametrize("thinking", [True, False])
def test_a_tools_result_goes_on_from_the_end_of_its_call(tokenizer: Tokenizer, thinking: bool) -> None:
    """Between a call and its result the history holds everything that the model wrote."""
    kwargs = {"enable_thinking": thinking}
    chat: list[Json] = [{"role": "user", "content": "Weather? " * SMALLEST_ENTRY}]
    prompt = tokenizer.chat_prompt(chat, [WEATHER], kwargs)
    assert prompt.continued
    call = {"name": "get_weather", "arguments": {"city": "Rome"}}
    wrote = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
    answer: Json = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    if thinking:
        answer["reasoning_content"] = "I call it."
        wrote = f"I call it.\n</think>\n\n{wrote}"
    index = cache()
    end, _ = index.add_entry((*prompt.tokens, *tokenizer.encode(wrote)))
    following = [*chat, answer, {"role": "tool", "content": "sunny"}]
    assert end is not None
    assert index.find_entry(tokenizer.chat_prompt(following, [WEATHER], kwargs).tokens) == end


# ---- whatever is asked


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(
    lambda bits: tuple(x for bit in bits for x in text(BLOCK, bit))
)


@given(st.lists(st.tuples(prompts, st.integers(0, 1200)), max_size=30), st.integers(0, 3000))
def test_the_budget_holds_and_what_is_found_is_a_prefix(asked: list[tuple[Tokens, int]], budget: int) -> None:
    """Entries never exceed the budget, dropped entries were held, and a found entry is a prefix of the prompt.

    Every boundary is a position at which `add_entry` adds an entry.
    """
    index = cache(prefix_bytes=budget, token_bytes=2, state_bytes=100)
    held: set[int] = set()
    for prompt, length in asked:
        found = index.find_entry(prompt)
        if found is not None:
            assert found.number in held
            assert found.tokens < len(prompt)
        start = found.tokens if found else 0
        for boundary in index.boundaries(prompt, start):
            assert start < boundary < len(prompt)
            assert boundary % BLOCK == 0
            entry, dropped = index.add_entry(prompt[:boundary])
            assert entry is not None
            assert held >= set(dropped)
            held = (held - set(dropped)) | {entry.number}
        entry, dropped = index.add_entry(prompt[:length])
        held -= set(dropped)
        held |= {entry.number} if entry else set()
        assert index.nbytes <= budget
        assert set(index.entries) == held
