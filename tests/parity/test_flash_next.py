"""Flash-Next against transformers, and its rows of n-grams."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import mlx.core as mx
import numpy as np
import pytest

from coordinator.planning.capacity import model_costs
from coordinator.planning.plan import NodeSpec, make_plan
from coordinator.schedule.request import GenerationRequest
from mtp.checkpoint.convert.add_head import plan_head_addition
from mtp.checkpoint.convert.convert import Settings, convert
from mtp.checkpoint.convert.foreign import open_source
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.flash_next.ngrams import Mapped, open_table, table_names
from mtp.layers.layer import KVFormat
from mtp.layers.sparse_attention import (
    IndexerArgs,
    SparseReads,
    chosen_blocks,
    gathered_attention,
    masked_attention,
)
from proto.errors import CheckpointError, SpanError
from proto.images import ImageLayout, ImageSpan
from proto.span import Span
from tests.parity.test_own_families import answers, different
from tests.support.checkpoints.checkpoints import edit_config, edit_tensors, read_tensors
from tests.support.checkpoints.flash_next import reference_model, text_config, write_flash_next
from tests.support.checkpoints.foreign import TYPES, Members, save_tensors
from worker.engine.engine_thread import EngineThread
from worker.engine.frame_engine import BegunFrame
from worker.model.loader import load_stage

torch = pytest.importorskip("torch", reason="transformers needs torch")

EOS = 255


@pytest.fixture(scope="module")
def text() -> dict[str, Any]:
    """Return the config of a model whose n-gram rows can be quantized."""
    return text_config(ple_embed_dim=128)


@pytest.fixture(scope="module")
def reference(text: dict[str, Any]) -> Any:
    """Return transformers' model."""
    return reference_model(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, reference: Any, text: dict[str, Any]) -> Path:
    """Write the same model as a checkpoint with a head."""
    return write_flash_next(tmp_path_factory.mktemp("flash-next") / "model", reference, text)


def logits_of(
    path: Path,
    tokens: Sequence[int],
    widths: Sequence[int],
    layout: ImageLayout | None = None,
    rows: mx.array | None = None,
) -> mx.array:
    """Return the logits of a stage with all layers, which reads `tokens` in segments of `widths`.

    With a `layout`, the embeddings are `rows`.
    """
    stage = load_stage(Checkpoint.open(path), Span(0, 8), first=True, last=True, dtype=mx.float32)
    caches = [layer.new_cache(KVFormat()) for layer in stage.layers]
    outputs, start = [], 0
    for width in widths:
        own = np.array(tokens[start : start + width])
        x = stage.embed_tokens(mx.array(own.tolist())) if rows is None else rows[start : start + width]
        x = mx.tile(x, (1, stage.config.shape.streams))
        for layer, cache in zip(stage.layers, caches, strict=True):
            cache.coming, cache.layout = own, layout
            x = layer.forward(x, [cache], [width], [False])
        outputs.append(stage.lm_head(stage.norm(x)))
        start += width
    return mx.concatenate(outputs)


def test_logits_are_those_of_transformers(model: Path, reference: Any) -> None:
    """300 tokens over ends of text and block borders, in segments of all widths: within 1e-5 of the range."""
    tokens = [random.Random(1).randrange(EOS) for _ in range(300)]
    for place in (50, 51, 120):
        tokens[place] = EOS
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    found = np.array(logits_of(model, tokens, (37, 1, 63, 2, 5, 1, 100, 91)))
    assert np.abs(found - expected).max() <= 1e-5 * (expected.max() - expected.min())
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()


def test_logits_beside_images_are_those_of_transformers(model: Path, reference: Any) -> None:
    """Two images shift the positions of queries, keys and blocks. Their rows are `<|image_pad|>` to the n-grams."""
    spans = (ImageSpan(11, 4, 6), ImageSpan(90, 8, 5))
    layout = ImageLayout(spans, (2, 1, 1))
    chance = random.Random(2)
    tokens = [chance.randrange(200) for _ in range(200)]
    for span in spans:
        tokens[span.start : span.end] = [254] * (span.end - span.start)
    axes = layout.axes(0, len(tokens))
    rows = mx.random.normal((len(tokens), 32), key=mx.random.key(4))
    with torch.no_grad():
        found = reference.model(
            inputs_embeds=torch.tensor(np.array(rows))[None],
            position_ids=torch.tensor(axes).T[:, None],
            ple_input_ids=torch.tensor([tokens]),
        )
        expected = reference.lm_head(found.last_hidden_state)[0].numpy()
    ours = np.array(logits_of(model, tokens, (11, 24, 55, 17, 23, 1, 29, 40), layout, rows))
    assert np.abs(ours - expected).max() <= 1e-5 * (expected.max() - expected.min())


def test_a_chunk_may_cross_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first queries see fewer blocks than the budget has."""
    monkeypatch.setattr("mtp.layers.sparse_attention.SCORE_BYTES", 2**12)
    mx.random.seed(3)
    q, k = mx.random.normal((1, 4, 60, 16)), mx.random.normal((1, 2, 70, 16))
    rest = mx.random.normal((60, 4, 16)), mx.random.normal((17, 16)), 10
    reads = SparseReads(q, k, k, *rest, IndexerArgs(4, 16, 32, 4), 0.25)
    assert mx.allclose(gathered_attention(reads), masked_attention(reads), atol=1e-6)


@pytest.mark.parametrize("tokens", [75, 100])
@pytest.mark.parametrize("attention", [gathered_attention, masked_attention])
def test_the_blocks_with_the_highest_scores_are_read(
    attention: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention of each query is that over its best blocks and the newest tokens, and equal scores are in order."""
    mx.random.seed(2)
    args, width = IndexerArgs(4, 16, 32, 4), 6
    for limit in ("TILE_BYTES", "SCORE_BYTES"):  # some queries at once
        monkeypatch.setattr(f"mtp.layers.sparse_attention.{limit}", 2**14)
    q = mx.random.normal((1, 4, width, 16))
    k, v = (mx.random.normal((1, 2, tokens, 16)) for _ in range(2))
    queries = mx.random.normal((width, 4, 16))
    blocks = mx.random.normal((tokens // 4, 16))
    found = attention(SparseReads(q, k, v, queries, blocks, tokens - width, args, 0.25))
    for i in range(width):
        last = tokens - width + i
        whole = (last + 1) // 4
        scores = np.maximum(np.array(queries[i] @ blocks[:whole].T), 0).sum(axis=0)
        best = np.argsort(-scores, kind="stable")[:8]
        read = [int(b) * 4 + j for b in sorted(best) for j in range(4)]
        own = mx.array([*read, *range(whole * 4, last + 1)])
        one = mx.fast.scaled_dot_product_attention(q[:, :, i : i + 1], k[:, :, own], v[:, :, own], scale=0.25)
        assert mx.allclose(found[:, :, i : i + 1], one, atol=1e-6)
    none = mx.zeros((1, 4, 16))
    assert chosen_blocks(none, blocks, mx.array([9]), 3).tolist() == [[0, 1, 2]]


def test_what_cannot_be_served_is_refused(model: Path, tmp_path: Path, text: dict[str, Any]) -> None:
    """Missing and damaged rows, a late layer of n-grams and groups name what is wrong."""
    checkpoint = Checkpoint.open(model)
    with pytest.raises(SpanError, match=r"layer 1 reads the tokens.*ple_layer_ids"):
        load_stage(checkpoint, Span(1, 8), first=False, last=True, dtype=None)
    with pytest.raises(SpanError, match="cannot be shared"):
        checkpoint.check_slices(2)
    torch_model = reference_model(text)
    for change, message in (
        (_without_rows, "rows of n-grams of layers.1 are missing"),
        (_short_rows, "rows, and config.json"),
    ):
        path = write_flash_next(tmp_path / message[:4], torch_model, text)
        edit_tensors(path, change)
        with pytest.raises(CheckpointError, match=message):
            load_stage(Checkpoint.open(path), Span(0, 8), first=True, last=True, dtype=None)
    bare = write_flash_next(tmp_path / "bare", torch_model, text, mtp=False)
    assert not Checkpoint.open(bare).mtp.complete


def test_rows_of_a_chunk_are_fetched_beside_the_frame_before(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage asks the disk for the rows of a chunk that waits, and for those of its first tokens afterwards."""
    calls = Mock()
    for owner, name in ((Mapped, "advise"), (BegunFrame, "finish_frame")):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, create_autospec(own, side_effect=own))
        calls.attach_mock(getattr(owner, name), name)
    monkeypatch.setattr(EngineThread, "queued", 1)
    defer = EngineThread.defer
    monkeypatch.setattr(EngineThread, "defer", lambda thread, work, _: defer(thread, work, 1.0))
    answers(model, "off", 1, 32, [GenerationRequest(tuple(range(130)), 1)])
    events = [-1 if name == "finish_frame" else len(args[1]) for name, args, _ in calls.mock_calls]
    assert [rows > 16 for rows in events[:7]] == [True, True, False, False, True, False, False]


def test_commands_know_the_family(model: Path, tmp_path: Path, text: dict[str, Any], reference: Any) -> None:
    """`add-mtp` and a pinned plan work. Cuts below the n-grams do not."""
    bare = write_flash_next(tmp_path / "bare", reference, text, mtp=False)
    convert(Checkpoint.open(bare), tmp_path / "mlx", Settings())
    source = Checkpoint.open(model)
    plan_head_addition(Checkpoint.open(tmp_path / "mlx"), source).write(source)
    assert different(answers(tmp_path / "mlx", "2", 1, 64), answers(model, "off", 1, 512, one_by_one=True)) == 0
    costs = model_costs(Checkpoint.open(model))
    with pytest.raises(SpanError, match="layers up to 1 read the tokens"):
        make_plan(costs, [NodeSpec("a", 2**40, pinned=Span(0, 1)), NodeSpec("b", 2**40)])
    assert make_plan(costs, [NodeSpec("a", 2**40, pinned=Span(0, 2)), NodeSpec("b", 2**40)]).stages
    eight = write_flash_next(tmp_path / "eight", reference, text)
    edit_tensors(eight, _rows_of_bytes)
    with pytest.raises(CheckpointError, match="rows of n-grams are stored as U8"):
        convert(Checkpoint.open(eight), tmp_path / "of eight", Settings(dtype="bfloat16"))


def test_rows_in_fp8_are_converted(tmp_path: Path, text: dict[str, Any], reference: Any) -> None:
    """The official FP8 release has its rows in FP8 with one scale for all, and its hash is that of the config."""
    plain = write_flash_next(tmp_path / "plain", reference, text)
    source = write_flash_next(tmp_path / "eight", reference, text)
    stored: Members = {}
    for name, weight in read_tensors(source).items():
        is_row = ".ngram_embedding." in name
        types = ("F8_E4M3", mx.to_fp8(weight / 0.5)) if is_row else (TYPES[weight.dtype], weight)
        stored[name] = types
    base = min(name for name in stored if ".ngram_embedding." in name)
    scale = f"{base.partition('.ngram_embedding.')[0]}.ngram_embedding.weight_scale"
    stored[scale] = ("BF16", mx.array([0.5], mx.bfloat16))
    save_tensors(source / "model.safetensors", stored)
    edit_config(source, lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(CheckpointError, match=r"stored as F8_E4M3.*mtp-coord convert"):
        open_table(open_source(source), "layers.1", len(stored[base][1]) * 4)
    convert(open_source(source), tmp_path / "out", Settings(dtype="float32"))
    converted = read_tensors(tmp_path / "out")
    rows = next(value for name, value in converted.items() if ".shards.0.weight" in name)
    wanted = read_tensors(plain)[base]
    assert mx.allclose(rows, wanted, rtol=0.07, atol=0.01)
    halved = write_flash_next(tmp_path / "halved", reference, text)
    edit_tensors(halved, partial(_with_factor, scale))
    tables = [
        open_table(
            checkpoint, part, sum(checkpoint.tensors[n].shape[0] for n in table_names(checkpoint, part)["weight"])
        )
        for checkpoint in map(Checkpoint.open, (plain, halved))
        for part in checkpoint.on_disk
    ]
    ids, width = np.arange(9), wanted.shape[1]
    found = [table.read(ids, width, mx.float32) for table in tables]
    assert mx.array_equal(found[0], found[1]) and mx.array_equal(found[0], wanted[:9])
    edit_tensors(plain, _other_multipliers)
    with pytest.raises(CheckpointError, match="hashed in another way"):
        load_stage(Checkpoint.open(plain), Span(0, 8), first=True, last=True, dtype=None)


def _other_multipliers(weights: dict[str, mx.array]) -> None:
    name = next(name for name in weights if name.endswith("layer_multipliers"))
    weights[name] = weights[name] + 2


def _with_factor(scale: str, weights: dict[str, mx.array]) -> None:
    """Store half of the rows, and the factor 2, which oMLX keeps beside rows that it has quantized."""
    for name in [name for name in weights if "ngram_embedding" in name]:
        weights[name] = weights[name] / 2
    weights[scale] = mx.array([2.0], mx.bfloat16)


def _rows_of_bytes(weights: dict[str, mx.array]) -> None:
    for name in [name for name in weights if "ngram_embedding" in name]:
        weights[name] = weights[name].astype(mx.uint8)


def _without_rows(weights: dict[str, mx.array]) -> None:
    for name in [name for name in weights if "ngram_embedding" in name]:
        del weights[name]


def _short_rows(weights: dict[str, mx.array]) -> None:
    name = next(name for name in weights if "ngram_embedding.shard_1." in name)
    weights[name] = weights[name][:-1]
