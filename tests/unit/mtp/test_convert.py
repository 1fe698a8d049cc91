"""Conversion: the output has the weights of the source in mlx layout, with the head. It may be stopped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mtp.builtin import checkpoint_dir
from mtp.checkpoint.convert.convert import Quantization, Settings, convert
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import local_name
from mtp.checkpoint.format.parts import read_part
from proto.errors import CheckpointError, UsageError
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import (
    Weights,
    assert_same_tensors,
    edit_tensors,
    read_tensors,
    write_checkpoint,
)
from tests.support.checkpoints.small_disk import ClaimedFreeSpace, small_disk

UNUSUAL = (("norm_topk_prob", False), ("mlp_only_layers", (1,)))

SOURCES: list[dict[str, Any]] = [
    {"tie": True},
    {"tie": False, "shards": 3},
    {"moe": True, "tie": False, "fused_experts": True, "fused_mtp_experts": False, "shards": 2},
    {"moe": True, "fused_experts": False, "fused_mtp_experts": True},
    {"moe": True, "tie": False, "qwen3_next": True, "fields": UNUSUAL},
]
each_source = pytest.mark.parametrize("options", SOURCES, ids=repr)
TOKENS = mx.array([[3, 14, 15, 92, 65, 35, 89, 79]])


def converted(source: Path, path: Path, settings: Settings | None = None) -> Path:
    convert(Checkpoint.open(source), path, settings or Settings(), shard_bytes=200_000)
    return path


def parameters(path: Path) -> Weights:
    """Return all parameters that stages load, by local name."""
    checkpoint = Checkpoint.open(path)
    weights = {
        f"{part}.{name}": weight
        for part in checkpoint.plans
        for name, weight in read_part(checkpoint, part, None).items()
    }
    mx.eval(weights)
    return weights


def local(weights: Weights) -> Weights:
    return {name: weight for stored, weight in weights.items() if (name := local_name(stored))}


@each_source
def test_unquantized_output_is_the_source_to_the_bit(
    checkpoints: Checkpoints, tmp_path: Path, options: dict[str, Any]
) -> None:
    """An unquantized conversion has equal parameters, the head's included, and equal logits in stock mlx-lm."""
    source = checkpoints(**options)
    out = converted(source, tmp_path / "out")
    assert Checkpoint.open(out).layout == "mlx"
    assert Checkpoint.open(out).mtp.complete
    assert_same_tensors(parameters(out), parameters(source))
    # Unfused experts, which mlx-lm cannot read, convert to the same weights as the fused ones of the same seed.
    original, _ = load_model(checkpoints(**options | {"fused_experts": True}))
    model, _ = load_model(out)
    assert mx.array_equal(model(TOKENS), original(TOKENS))


@pytest.mark.parametrize(
    ("bits", "options"),
    [
        (4, {"moe": False}),
        (8, {"moe": False}),
        (4, {"moe": True}),
        (8, {"moe": True}),
        (4, {"moe": True, "qwen3_next": True}),
    ],
    ids=repr,
)
def test_quantized_output_is_what_mlx_lm_makes(
    checkpoints: Checkpoints, tmp_path: Path, bits: int, options: dict[str, Any]
) -> None:
    """Every tensor has the same bits as with mlx-lm's own converter, and the head is packed like the backbone."""
    options = options | {"tie": False}
    settings = Settings(Quantization.of(bits, None))
    out = converted(checkpoints(**options), tmp_path / "out", settings)
    expected = checkpoints(**options, layout="mlx", quantize=bits)
    assert_same_tensors(local(read_tensors(out)), local(read_tensors(expected)))
    assert_same_tensors(parameters(out), parameters(expected))


def test_an_mlx_source_without_quantization_is_taken(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Converting a checkpoint in mlx layout does not shift its norms again."""
    source = checkpoints(layout="mlx")
    assert_same_tensors(parameters(converted(source, tmp_path / "out")), parameters(source))


def test_the_head_lies_where_old_mlx_lm_does_not_look(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The head lies outside `model*.safetensors`, where mlx-lm up to 0.31.3 would shift the norms twice."""
    out = converted(checkpoints(), tmp_path / "out")
    for file in out.glob("*.safetensors"):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        heads = ["mtp." in name for name in loaded]
        assert all(heads) if file.name == "mtp.safetensors" else not any(heads)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read_tensors(out).keys()
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in read_tensors(out).values())


def test_config_says_what_is_there(tmp_path: Path) -> None:
    """config.json announces no missing head and no vision part, and keeps all other fields."""
    source = write_checkpoint(tmp_path / "raw", mtp=False)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"vision_config": {"depth": 3}}))
    (source / "preprocessor_config.json").write_text("{}")
    (source / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    out = converted(source, tmp_path / "out", Settings(vision=False))
    config["text_config"]["mtp_num_hidden_layers"] = 0
    assert json.loads((out / "config.json").read_text()) == config
    assert not Checkpoint.open(out).mtp.announced
    beside = {file.name for file in out.iterdir() if file.suffix != ".safetensors"}
    assert beside == {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer_config.json",
    }


def test_builtin_converts(tmp_path: Path) -> None:
    """The built-in model converts, with its tokenizer."""
    out = converted(checkpoint_dir(), tmp_path / "out", Settings(Quantization.of(8, None)))
    assert Checkpoint.open(out).mtp.complete
    assert (out / "tokenizer.json").read_text() == (checkpoint_dir() / "tokenizer.json").read_text()


# ---- refusals


def test_a_quantized_source_cannot_be_converted(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A refused conversion writes nothing."""
    with pytest.raises(CheckpointError, match="is quantized already"):
        converted(checkpoints(layout="mlx", quantize=4), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("renamed", "to", "message"),
    [
        ("mtp.fc.weight", None, r"mtp\.fc\.weight of the MTP head is missing"),
        ("mtp.fc.weight", "mtp.fd.weight", r"mtp\.fc\.weight of the MTP head is missing"),
        (
            "model.language_model.norm.weight",
            None,
            r"tensor norm\.weight is missing",
        ),
        ("model.language_model.norm.weight", "model.language_model.nrm.weight", "no part of"),
    ],
)
def test_sources_with_wrong_tensors(tmp_path: Path, renamed: str, to: str | None, message: str) -> None:
    """A missing or unknown tensor is named, and nothing is written."""
    source = write_checkpoint(tmp_path / "raw")
    weight = read_tensors(source)[renamed]
    edit_tensors(source, lambda weights: weights.pop(renamed))
    if to:
        edit_tensors(source, lambda weights: weights.update({to: weight}))
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        converted(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_a_stopped_conversion_is_no_checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """config.json comes last. A directory that is in use, also by an unfinished conversion, is refused."""
    source, out = checkpoints(), tmp_path / "out"

    def stop_late(done: int, total: int) -> None:
        if done > total * 0.9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(Checkpoint.open(source), out, Settings(), stop_late, shard_bytes=50_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(out)
    with pytest.raises(UsageError, match="exists already"):
        convert(Checkpoint.open(source), out, Settings())


@pytest.mark.thorough
def test_a_disk_that_cannot_hold_the_output(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is reported before the first tensor is read, or when the disk fills during the conversion."""
    source = checkpoints()
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(CheckpointError, match=r"are needed, and the disk has .* left"):
            convert(Checkpoint.open(source), disk / "out", Settings())
        monkeypatch.setattr("shutil.disk_usage", lambda path: ClaimedFreeSpace())
        with pytest.raises(CheckpointError, match="the disk is full"):
            convert(Checkpoint.open(source), disk / "other", Settings())
        assert not (disk / "other" / "config.json").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(("fused", "bits"), [(True, 4), (False, 0)])
def test_peak_memory_is_that_of_the_largest_stack(tmp_path: Path, fused: bool, bits: int) -> None:
    """A checkpoint of at least 8 times its largest stack of experts converts with at most 3 stacks in memory."""
    source = write_checkpoint(tmp_path / "raw", moe=True, layers=4, hidden=384, fused_experts=fused, shards=2)
    checkpoint = Checkpoint.open(source)
    stacks: dict[str, int] = {}
    for name, info in checkpoint.tensors.items():
        key = re.sub(r"\.experts\.\d+", ".experts", name)
        stacks[key] = stacks.get(key, 0) + info.nbytes
    stack = max(stacks.values())
    assert sum(stacks.values()) >= 8 * stack
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    convert(checkpoint, tmp_path / "out", Settings(Quantization.of(bits, None) if bits else None))
    assert mx.get_peak_memory() - before <= 3 * stack
