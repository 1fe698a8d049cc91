"""Sequences of a model of mlx-lm in one array: the logits of each alone, whichever run together, and no array left."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import mlx.core as mx
import pytest

from mtp.mlx_models.slots import SlotKV
from mtp.mlx_models.trial import CLOSE, Pair, Sequence_, Stack, commit, difference
from tests.support.tiny_configs import tiny_config


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Return a dense model."""
    return Pair(tiny_config("llama"))


@pytest.fixture
def stack(pair: Pair) -> Stack:
    """Return the model over two spans whose sequences can stand in one array."""
    return pair.spans([1], together=True, slots=True)


def parts(sequence: Sequence_) -> list[SlotKV]:
    """Return the keys and values of all layers."""
    return [part for caches in sequence for cache in caches for part in cache.held]


def started(stack: Stack, pair: Pair, lengths: list[int]) -> list[Sequence_]:
    """Return sequences after prompts of different lengths, which run alone."""
    found = [stack.new() for _ in lengths]
    for number, (sequence, length) in enumerate(zip(found, lengths, strict=True)):
        stack.logits([sequence], [pair.texts[number % 2][:length]])
    return found


def in_one_array(sequences: list[Sequence_]) -> bool:
    """Return whether all layers of `sequences` have them in one array."""
    return all(
        len({id(part.home) for part in each} - {id(None)}) == 1 for each in zip(*map(parts, sequences), strict=True)
    )


@pytest.mark.parametrize("seed", range(3))
def test_any_company_gives_the_logits_of_each_alone(pair: Pair, stack: Stack, seed: int) -> None:
    """Sequences join, leave, run alone, are copied, and have windows accepted, cut and dropped."""
    chance, joined = random.Random(seed), 0
    lengths = [9, 4, 13]
    running = started(stack, pair, lengths)
    texts = [0, 1, 0]
    for _ in range(14):
        event = chance.choice(["together"] * 6 + ["some", "join", "leave", "copy"])
        members = list(range(len(running)))
        if event == "some":
            members = sorted(chance.sample(members, chance.randrange(1, len(members) + 1)))
        elif event == "join":
            running += started(stack, pair, [5])
            lengths, texts = [*lengths, 5], [*texts, 0]
            members.append(len(running) - 1)
        elif event == "leave" and len(running) > 2:
            gone = chance.choice(members)
            del running[gone], lengths[gone], texts[gone]
            members.pop()
        elif event == "copy":
            gone = chance.choice(members)
            running[gone] = [[cache.copy() for cache in own] for own in running[gone]]
        width = chance.choice((1, 3))
        accepted = [chance.randrange(1, width + 1) for _ in members]
        rows = [
            [*pair.texts[texts[i]][lengths[i] : lengths[i] + count], *[pair.wrong] * (width - count)]
            for i, count in zip(members, accepted, strict=True)
        ]
        found = stack.logits([running[i] for i in members], rows, is_open=True)
        joined += len(members) > 1 and in_one_array([running[i] for i in members])
        for place, (i, count) in enumerate(zip(members, accepted, strict=True)):
            text, at = pair.texts[texts[i]], lengths[i]
            expected = pair.logits([text[:at], text[at : at + count]])[1]
            assert difference(found[place * width : place * width + count], expected) < CLOSE
            commit(running[i], count, width)
            lengths[i] += count
    assert joined >= 3


def test_a_frame_has_no_more_operations_for_more_sequences(pair: Pair, stack: Stack, tmp_path: Path) -> None:
    """A layer updates and attends all sequences at once from the second frame on."""
    counts = []
    for lengths in ([9, 4], [9, 4, 7, 3, 5]):
        sequences = started(stack, pair, lengths)
        for _ in range(2):
            stack.logits(sequences, [[1]] * len(sequences))
        x, widths = mx.zeros((len(sequences), 1), mx.uint32), [1] * len(sequences)
        arrays: dict[int, mx.array] = {}
        for number, span in enumerate(stack.spans):
            caches = [sequence[number] for sequence in sequences]
            span.enter(x, caches, widths)
            for index, layer in enumerate(span.layers):
                x = layer.forward(x, [own[index] for own in caches], widths)
            arrays |= {id(array): array for own in caches for cache in own for array in cache.arrays()}
        mx.export_to_dot(str(tmp_path / "graph"), x, *arrays.values())
        counts.append((tmp_path / "graph").read_text().count("label ="))
    assert counts[0] == counts[1]


def test_who_leaves_keeps_no_array_of_others(pair: Pair, stack: Stack) -> None:
    """A sequence that runs alone has its own rows, and so has one that does not run."""
    sequences = started(stack, pair, [9, 4, 7, 3])
    for _ in range(3):
        stack.logits(sequences, [[1]] * 4)
    held = sum(cache.nbytes for sequence in sequences for own in sequence for cache in own)
    assert held == sum(array.nbytes for part in parts(sequences[0]) for array in part.arrays())
    copies = [[[cache.copy() for cache in own] for own in sequence] for sequence in sequences[:1]]
    mx.eval([cache.arrays() for sequence in copies for own in sequence for cache in own])
    stack.logits(sequences[:1], [[1]])
    del sequences[:3]
    gc.collect()
    for span in stack.spans:
        span.groups = []
        span.skeleton._calls = []
    mx.synchronize()
    before = mx.get_active_memory()
    left = sum(part.nbytes for sequence in (*sequences, *copies) for part in parts(sequence))
    assert left < held / 10
    del sequences, copies
    freed = before - mx.get_active_memory()
    assert 0 < freed < held / 4


def test_sequences_of_very_different_lengths_stay_apart(pair: Pair, stack: Stack) -> None:
    """A long sequence beside short ones would need room for as many tokens in each row."""
    stack_of = started(stack, pair, [9, 4, 3])
    stack.logits(stack_of[:1], [[1] * 700])
    for _ in range(3):
        stack.logits(stack_of, [[1]] * 3)
    assert not any(part.home for sequence in stack_of for part in parts(sequence))


def test_those_that_stay_move_at_once(pair: Pair, stack: Stack) -> None:
    """When a sequence ends, the others keep one array, without its row."""
    sequences = started(stack, pair, [9, 4, 7])
    for _ in range(2):
        stack.logits(sequences, [[1]] * 3)
    del sequences[1]
    stack.logits(sequences, [[1]] * 2)
    assert in_one_array(sequences)
    assert all(array.shape[0] == 2 for part in parts(sequences[0]) for array in part.arrays())


def test_sequences_that_part_wait_longer(pair: Pair, stack: Stack) -> None:
    """Each move copies all keys and values, so those that part each second frame seldom move."""
    sequences = started(stack, pair, [9, 4])
    moved = []
    for _ in range(3):
        stack.logits(sequences[:1], [[1]])
        frames = 0
        while not in_one_array(sequences) and frames < 9:
            stack.logits(sequences, [[1]] * 2)
            frames += 1
        moved.append(frames)
    assert moved == [2, 3, 5]
