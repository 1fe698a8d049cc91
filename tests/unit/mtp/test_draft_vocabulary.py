"""The draft vocabulary: its rows are those of lm_head, and all other tokens are impossible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from coordinator.planning.capacity import model_costs
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.cut import Cut
from mtp.head.draft_vocabulary import (
    STEP,
    DraftRows,
    DraftVocabulary,
    drafted_share,
    drafted_tokens,
    frequent_tokens,
)
from mtp.layers.layer import KVFormat
from proto.errors import UsageError
from proto.span import Span
from tests.conftest import Checkpoints
from worker.model.loader import load_stage
from worker.model.verifier import Verifier

VOCAB, HIDDEN = 512, 64
LINEAR, EMBEDDING = nn.Linear(HIDDEN, VOCAB, bias=False), nn.Embedding(VOCAB, HIDDEN)
MODULES: dict[str, Any] = {
    "linear": LINEAR,
    "embedding": EMBEDDING,
    "4 bit": LINEAR.to_quantized(64, 4),
    "8 bit, tied": EMBEDDING.to_quantized(64, 8),
    "mxfp4": LINEAR.to_quantized(32, 4, "mxfp4"),
}


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_logits_of_the_part_are_those_of_lm_head(module: Any) -> None:
    """The stored rows are not quantized again, so the logits are equal, and all others are minus infinity."""
    x, part = mx.random.normal((3, HIDDEN)), [1, 5, 300, 511, *range(64, 128)]
    found, expected = DraftRows(module, part)(x), getattr(module, "as_linear", module)(x)
    chosen = mx.array(part)
    assert found.shape == expected.shape
    assert mx.allclose(found[:, chosen], expected[:, chosen], atol=1e-5)
    assert mx.isinf(found).sum().item() == 3 * (VOCAB - len(part))


def resolved(text: str) -> set[int]:
    tokenizer = Tokenizer.load(checkpoint_dir())
    size = tokenizer.vocab_size
    bitmap = DraftVocabulary.parse(text).resolve(tokenizer.backend, tokenizer.eos_ids, size)
    return set(drafted_tokens(bitmap, size)) if bitmap else set(range(size))


def test_a_part_has_the_first_merges_and_the_control_tokens(tmp_path: Path) -> None:
    """The part has a multiple of 64 tokens. A file may name any others, as lines or as JSON."""
    tokenizer = Tokenizer.load(checkpoint_dir())
    control = {*tokenizer.control_ids, *tokenizer.eos_ids}
    assert {*frequent_tokens(tokenizer.backend)[:1000], *control} <= resolved("1000")
    for text, size in (("1000", 1000 + len(tokenizer.backend.get_added_tokens_decoder())), ("auto", 1638)):
        assert 0 <= len(resolved(text)) - size < 2 * STEP
        assert len(resolved(text)) % STEP == 0
    file = tmp_path / "ids.txt"
    for content in ("4000\n4001 7\n", "[4000, 4001, 7]"):
        file.write_text(content)
        assert {7, 4000, 4001} | control <= resolved(str(file))
        assert len(resolved(str(file))) == STEP
    assert resolved("off") == resolved("99999") == set(range(tokenizer.vocab_size))


@pytest.mark.parametrize("content", [None, "", "1 two 3", "5 4096", "-1", "\xff"])
def test_a_part_that_is_no_part_of_the_model_is_refused(content: str | None, tmp_path: Path) -> None:
    """An error names the option and the file."""
    file = tmp_path / "ids.txt"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match=r"--draft-vocab .*ids\.txt"):
        resolved(str(file))
    with pytest.raises(UsageError, match="--draft-vocab"):
        drafted_tokens(b"\xff" * 9, VOCAB)


@pytest.mark.parametrize("options", [{"tie": False}, {}, {"quantize": 4, "tie": False, "layout": "mlx"}], ids=str)
def test_the_rows_are_counted_where_the_head_is(checkpoints: Checkpoints, options: dict[str, Any]) -> None:
    """Planner and host count the bytes of the second copy, and the planner a draft by the rows that it reads."""
    checkpoint = Checkpoint.open(checkpoints(layers=4, **options))
    vocab, layers = checkpoint.config.vocab_size, checkpoint.config.num_layers
    bitmap = b"\xff" * (vocab // 32) + bytes(vocab // 8 - vocab // 32)
    assert drafted_share(bitmap, vocab) == 0.25
    part = "embed" if checkpoint.config.tie_word_embeddings else "lm_head"
    rows = checkpoint.part_bytes()[part] // 4
    plain, trimmed = (model_costs(checkpoint, draft_vocab=each) for each in (b"", bitmap))
    assert trimmed.last_stage_bytes == plain.last_stage_bytes + rows
    assert trimmed.draft_seconds < plain.draft_seconds
    assert model_costs(checkpoint, with_head=False, draft_vocab=bitmap) == model_costs(checkpoint, with_head=False)
    stage = load_stage(checkpoint, Span(0, layers), first=True, last=True, dtype=None, draft_vocab=bitmap)
    assert stage.draft_rows is not None
    held = sum(value.nbytes for value in stage.draft_rows.module.parameters().values())
    assert held == rows


def test_drafts_come_from_the_part_and_tokens_from_all(checkpoints: Checkpoints) -> None:
    """The last stage draws drafts from the chosen rows alone, and its own choices from all rows of lm_head."""
    checkpoint = Checkpoint.open(checkpoints(layers=4, tie=False))
    span, bitmap = Span(0, checkpoint.config.num_layers), b"\x55" * (checkpoint.config.vocab_size // 8)
    verifier = Verifier(
        load_stage(checkpoint, span, first=True, last=True, dtype=None, draft_vocab=bitmap),
        KVFormat(),
    )
    assert verifier.drafter is not None
    row = mx.zeros((1, verifier.drafter.head.width))
    impossible = mx.isinf(verifier.drafter.unembed(row)[0])
    assert mx.array_equal(impossible, mx.arange(checkpoint.config.vocab_size) % 2 == 1).item()
    assert not mx.isinf(verifier.unembed(row)).any().item()


def test_slices_and_members_have_the_rows_of_the_whole(checkpoints: Checkpoints) -> None:
    """A process with a share of lm_head reads the rows for drafts from the whole one."""
    checkpoint = Checkpoint.open(checkpoints(layers=4, tie=False))
    span, bitmap = Span(0, checkpoint.config.num_layers), b"\x55" * (checkpoint.config.vocab_size // 8)
    found = []
    for slices in (1, 2):
        read = load_stage(
            checkpoint, span, first=True, last=True, dtype=None, slices=slices, draft_vocab=bitmap
        ).draft_rows
        assert read is not None
        found.append(read.module.weight)
    assert mx.array_equal(*found)
    whole, cut = (model_costs(each, draft_vocab=bitmap) for each in (checkpoint, checkpoint.cut_for(Cut(0, 2))))
    plain = [model_costs(each) for each in (checkpoint, checkpoint.cut_for(Cut(0, 2)))]
    extra = [a.last_stage_bytes - b.last_stage_bytes for a, b in zip((whole, cut), plain, strict=True)]
    assert extra[0] == extra[1] == found[0].nbytes
