"""The draft vocabulary: the logits of its words are those of the whole projection, and all others are impossible."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mtp.head.draft_vocabulary import (
    RECENT_BLOCKS,
    DraftVocabulary,
    DraftVocabularySize,
    draft_vocabulary,
)
from mtp.layers.exact import RangedRows, RowRange
from mtp.layers.joined.products import ColumnLinear
from proto.errors import UsageError

VOCAB, HIDDEN, LOWEST = 512, 64, 64


def projections() -> list[Any]:
    """Return a linear layer, an embedding, quantized ones, and a layer by columns."""
    mx.random.seed(1)
    linear, embedding = nn.Linear(HIDDEN, VOCAB, bias=False), nn.Embedding(VOCAB, HIDDEN)
    by_rows = nn.Linear(HIDDEN, VOCAB, bias=False)
    quantized = [linear.to_quantized(64, 4), embedding.to_quantized(64, 8)]
    return [linear, embedding, *quantized, ColumnLinear.from_modules([by_rows])]


def whole_of(module: Any) -> Any:
    """Return the projection over all words."""
    return getattr(module, "as_linear", module)


def part_of(module: Any, *, auto: bool = False) -> DraftVocabulary:
    """Return the draft vocabulary of the lowest tokens."""
    size = DraftVocabularySize(LOWEST, auto)
    part = draft_vocabulary(module, whole_of(module), VOCAB, size)
    assert part is not None
    return part


def known(part: DraftVocabulary) -> list[int]:
    """Return the tokens that can be drafted."""
    logits = part(mx.zeros((1, HIDDEN)))[0]
    return [i for i, value in enumerate(logits.tolist()) if value != -float("inf")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "module", projections(), ids=["linear", "embedding", "4 bit", "8 bit tied", "columns"]
)
def test_logits_of_the_part_are_those_of_the_whole(module: Any) -> None:
    part, x = part_of(module), mx.random.normal((3, HIDDEN))
    part.record_tokens([300, 301, 500], chosen=False)
    found, expected = part(x), whole_of(module)(x)
    inside = [*range(LOWEST), *range(288, 304), *range(496, 512)]
    assert found.shape == expected.shape
    assert mx.allclose(found[:, mx.array(inside)], expected[:, mx.array(inside)], atol=1e-5)
    # A block of recent words is always gathered; without any it is the first.
    assert known(part) == inside


def test_the_oldest_words_leave() -> None:
    part = part_of(projections()[0])
    part._recent = dict.fromkeys(range(1000, 1000 + RECENT_BLOCKS))
    part.record_tokens([400], chosen=False)
    assert len(part._recent) == RECENT_BLOCKS
    assert 1000 not in part._recent and 25 in part._recent


def test_auto_uses_the_part_while_it_saves_more_than_it_misses() -> None:
    part = part_of(projections()[0], auto=True)
    assert not part.in_use
    part.saved = 0.1
    assert part.in_use
    part.record_tokens([80, 96, 112, 128, 144, 160], chosen=False)
    assert part.in_use  # words of a prompt are no misses
    part.record_tokens([176, 192, 208], chosen=True)
    assert part.in_use
    part.record_tokens([224, 240, 256], chosen=True)
    assert not part.in_use
    assert len(known(part)) == VOCAB
    part.record_tokens([3] * 30, chosen=True)
    assert part.in_use


def test_the_saving_is_measured() -> None:
    part = part_of(projections()[0], auto=True)
    part.measure(mx.zeros((1, HIDDEN)), mx.zeros((1, HIDDEN)), lambda x: x)
    assert 0.0 <= part.saved <= 1.0


@pytest.mark.parametrize(
    ("module", "vocab", "tokens"),
    [
        (nn.Linear(HIDDEN, VOCAB), VOCAB, 64),
        (nn.Linear(HIDDEN, VOCAB, bias=False), VOCAB, 0),
        (nn.Linear(HIDDEN, VOCAB, bias=False), VOCAB, 300),
        (nn.Linear(HIDDEN, 500, bias=False), 500, 64),
        (nn.ReLU(), VOCAB, 64),
    ],
    ids=["bias", "off", "most words", "odd vocabulary", "no projection"],
)
def test_without_a_useful_part_all_words_are_drafted(module: Any, vocab: int, tokens: int) -> None:
    assert draft_vocabulary(module, module, vocab, DraftVocabularySize(tokens)) is None


def test_exact_mode_s_wrappers_are_looked_through() -> None:
    linear, embedding = projections()[:2]
    for inner in (linear, embedding.as_linear):
        wrapped = RangedRows(inner, RowRange(2, 5))
        assert draft_vocabulary(wrapped, wrapped, VOCAB, DraftVocabularySize(64)) is not None


@pytest.mark.parametrize("text", ["", "some", "15", "-3", "999999999", "1.5"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--draft-vocab"):
        DraftVocabularySize.parse(text)


def test_sizes() -> None:
    assert DraftVocabularySize.parse("off") == DraftVocabularySize()
    assert DraftVocabularySize.parse("4000") == DraftVocabularySize(4000)
    assert DraftVocabularySize.parse("auto").auto
