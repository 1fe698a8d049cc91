"""Opening a checkpoint of any family: the facts from config and headers, and a clear error for each fault."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from coordinator.drafts.controller import MtpMode
from coordinator.planning.capacity import model_costs
from coordinator.schedule.local_generator import AUTO, effective_mtp_mode
from mtp.checkpoint.convert.add_head import plan_head_addition
from mtp.checkpoint.convert.convert import Settings, convert
from mtp.checkpoint.families.qwen3_5 import Qwen35
from mtp.checkpoint.format.checkpoint import Checkpoint, MtpStatus
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.parts import report
from mtp.checkpoint.format.shard import MAX_HEADER_BYTES
from mtp.checkpoint.hub.missing_head import fetched_if_possible
from mtp.checkpoint.hub.published import MODELS
from mtp.checkpoint.known_families import FAMILIES, find_family
from proto.errors import CheckpointError, SpanError, UsageError
from proto.span import Span
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import edit_config, edit_tensors, write_checkpoint
from worker.model.loader import load_stage


@pytest.fixture
def dense(tmp_path: Path, checkpoints: Checkpoints) -> Path:
    """Return a raw dense checkpoint in three shards that a test may edit."""
    return Path(shutil.copytree(checkpoints(shards=3), tmp_path / "dense"))


# ---- config


def test_config_is_read_from_text_config_or_top_level(dense: Path) -> None:
    """A text-only checkpoint has the same fields without the wrapper, and its own model type."""
    wrapped = ModelConfig.load(dense)
    text = json.loads((dense / "config.json").read_text())["text_config"]
    (dense / "config.json").write_text(json.dumps(text))
    assert ModelConfig.load(dense) == wrapped
    assert wrapped.model_type == "qwen3_5"
    assert wrapped.shape.kinds == ("gdn", "gdn", "gdn", "attention") * 2
    assert wrapped.eos_token_ids == (255,)
    assert wrapped.text()["tie_word_embeddings"] is True


# ---- files


def test_a_truncated_file_is_named_wherever_it_was_cut(dense: Path) -> None:
    """A file cut before, in or after the header, or by one byte, is refused by name."""
    file = dense / "model-00002-of-00003.safetensors"
    whole = file.read_bytes()
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors"):
            Checkpoint.open(dense)
    file.write_bytes(whole)
    Checkpoint.open(dense)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"x": 1}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"x": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    ],
)
def test_a_header_that_lies_is_refused(dense: Path, header: bytes) -> None:
    """A header whose entries contradict each other or the file's size is refused by name."""
    file = dense / "model-00001-of-00003.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors: "):
        Checkpoint.open(dense)


def test_a_huge_header_is_refused_before_it_is_read(dense: Path) -> None:
    """The error for text instead of tensors mentions a Git LFS pointer."""
    file = dense / "model-00001-of-00003.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="Git LFS"):
        Checkpoint.open(dense)
    assert MAX_HEADER_BYTES < 2**27


def test_an_index_that_names_a_missing_shard_or_tensor_is_refused(dense: Path) -> None:
    """A missing shard is refused by name when the checkpoint is opened."""
    index = dense / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    entries["weight_map"]["mtp.extra.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match=r"model-00001.*no tensor mtp\.extra\.weight"):
        Checkpoint.open(dense)
    (dense / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors is missing"):
        Checkpoint.open(dense)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {}}', "{"])
def test_an_index_that_holds_nonsense_is_named(dense: Path, index: str) -> None:
    """A config or index that is not JSON, or not an object, is refused by name."""
    (dense / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint.open(dense)


def test_an_index_cannot_point_outside_its_directory(dense: Path) -> None:
    """An index may name only files in its own directory, since its file names come from a download."""
    shutil.copy(dense / "model-00001-of-00003.safetensors", dense.parent / "x.safetensors")
    index = '{"weight_map": {"mtp.fc.weight": "../x.safetensors"}}'
    (dense / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="is not the name of a file in the same directory"):
        Checkpoint.open(dense)


# ---- layout


@pytest.mark.parametrize(("form", "layout"), [("pt", "raw"), ("mlx", "mlx")])
def test_without_gdn_layers_the_metadata_tells_the_layout(dense: Path, form: str, layout: str) -> None:
    """Without a convolution the metadata of the file decides."""

    def drop_convolutions(weights: dict[str, mx.array]) -> None:
        for name in [n for n in weights if "conv1d" in n]:
            del weights[name]

    edit_tensors(dense, drop_convolutions, form)
    assert Checkpoint.open(dense).layout == layout
    edit_tensors(dense, drop_convolutions, "")
    with pytest.raises(CheckpointError, match="the layout is unknown"):
        Checkpoint.open(dense)


def test_raw_and_converted_layers_in_one_checkpoint_are_refused(dense: Path) -> None:
    """A mix of raw and converted files is refused."""
    name = "model.language_model.layers.1.linear_attn.conv1d.weight"
    edit_tensors(dense, lambda weights: weights.update({name: weights[name].moveaxis(2, 1)}))
    with pytest.raises(CheckpointError, match=r"mixed: .* is raw, .*layers\.1.* is converted"):
        Checkpoint.open(dense)


# ---- what is there


def test_a_head_short_of_one_expert_is_incomplete(tmp_path: Path) -> None:
    """The status lists the stored name of a missing expert."""
    path = write_checkpoint(tmp_path, moe=True, layers=4)
    gone = "mtp.layers.0.mlp.experts.2.up_proj.weight"
    edit_tensors(path, lambda weights: weights.pop(gone))
    status = Checkpoint.open(path).mtp
    assert (status.present, status.complete, status.missing) == (True, False, (gone,))


def test_a_head_beside_an_indexed_checkpoint_is_found(tmp_path: Path) -> None:
    """A file outside the index may contribute the head, and only the head."""
    path = write_checkpoint(tmp_path / "a", layout="mlx", shards=2, mtp=False)
    whole = mx.load(str(write_checkpoint(tmp_path / "b", layout="mlx") / "model.safetensors"))
    assert isinstance(whole, dict)
    mx.save_safetensors(str(path / "mtp.safetensors"), whole, {"format": "mlx"})
    checkpoint = Checkpoint.open(path)
    assert checkpoint.mtp.complete
    assert checkpoint.tensors["mtp.fc.weight"].file.name == "mtp.safetensors"
    assert checkpoint.tensors["language_model.model.norm.weight"].file.name != "mtp.safetensors"


def test_part_bytes_cover_every_tensor_once(checkpoints: Checkpoints) -> None:
    """The bytes of all parts and of the vision part add up to the file; a fused tensor counts once."""
    for options in ({"tie": False}, {"moe": True}, {"moe": True, "fused_experts": False}):
        checkpoint = Checkpoint.open(checkpoints(**options))
        vision = checkpoint.tensors["model.visual.patch_embed.proj.weight"].nbytes
        total = sum(info.nbytes for info in checkpoint.tensors.values())
        assert sum(checkpoint.part_bytes().values()) + vision == total


def test_stage_parts_are_the_span_and_the_ends_it_owns(checkpoints: Checkpoints) -> None:
    """The first stage holds the embedding; the last holds norm, head, an untied lm_head, and the embedding again."""
    tied, untied = (Checkpoint.open(checkpoints(tie=tie)) for tie in (True, False))
    span = Span(3, 4)
    assert tied.stage_parts(span, first=False, last=False) == ("layers.3",)
    assert tied.stage_parts(span, first=True, last=False) == ("embed", "layers.3")
    last = untied.stage_parts(span, first=False, last=True)
    assert last == ("embed", "layers.3", "norm", "lm_head", "mtp")
    assert untied.stage_parts(span, first=False, last=True, with_head=False) == (
        "layers.3",
        "norm",
        "lm_head",
    )
    assert tied.stage_parts(span, first=False, last=True, with_head=False) == (
        "embed",
        "layers.3",
        "norm",
    )
    with pytest.raises(SpanError, match="8 layers"):
        tied.stage_parts(Span(7, 9), first=False, last=True)


# ---- fingerprint


def test_the_fingerprint_follows_content_and_nothing_else(tmp_path: Path) -> None:
    """The fingerprint is equal for other shards or directories, and differs for other weights or another RoPE."""
    one = write_checkpoint(tmp_path / "one", layers=4)
    two = write_checkpoint(tmp_path / "two", layers=4, shards=3)
    other = write_checkpoint(tmp_path / "other", layers=4, seed=1)
    assert _fingerprint(one) == _fingerprint(two)
    assert _fingerprint(one) != _fingerprint(other)
    rope = {"rope_theta": 20000.0}
    edit_config(two, lambda config: config["text_config"]["rope_parameters"].update(rope))
    assert _fingerprint(one) != _fingerprint(two)


def test_the_fingerprint_sees_one_changed_tensor(tmp_path: Path) -> None:
    """A single changed tensor of the same shape changes the fingerprint."""
    path = write_checkpoint(tmp_path, layers=4)
    before = _fingerprint(path)
    name = "model.language_model.layers.2.mlp.up_proj.weight"
    edit_tensors(path, lambda weights: weights.update({name: weights[name] * 1.001}))
    assert _fingerprint(path) != before


def _fingerprint(path: Path) -> str:
    return Checkpoint.open(path).fingerprint()


(NEXT,) = [model for model in MODELS if model.model_type == "qwen3_next"]
(EXPERTS,) = [model for model in MODELS if model.name == "Qwen3.5-35B-A3B"]


def test_every_name_belongs_to_one_family() -> None:
    """Each `model_type` finds its family, and the reported type finds the same one."""
    for family in FAMILIES:
        for names, head_only in ((family.model_types, False), (family.head_types, True)):
            for name, reported in names.items():
                assert find_family(name) == (family, reported, head_only)
                assert find_family(reported) == (family, reported, False)


def test_a_head_alone_has_the_family_of_its_model() -> None:
    """A drafter of a mixture of experts is one, although tools write the dense type into config.json."""
    config = EXPERTS.config | {"model_type": "qwen3_5_mtp"}
    found = ModelConfig.parse(Path("config.json"), config)
    assert (found.model_type, found.head_only, found.num_experts) == ("qwen3_5_moe", True, 256)


def test_qwen3_next_has_a_head_that_its_config_does_not_mention() -> None:
    """The published config announces no head. A config with 0 announces none."""
    assert NEXT.parsed().mtp_layers == 1
    assert NEXT.parsed(mtp_num_hidden_layers=0).mtp_layers == 0
    assert NEXT.parsed(num_nextn_predict_layers=1).mtp_layers == 1


def test_a_family_without_a_head_is_served_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No head is announced, loaded, charged, converted or asked for. A request for one is refused by its cause."""
    path = write_checkpoint(tmp_path / "model")
    other = Checkpoint.open(write_checkpoint(tmp_path / "other"))
    whole = other.config.shape
    monkeypatch.setattr(Qwen35, "head", lambda self, text: None)
    monkeypatch.setattr(Qwen35, "shape", lambda self, text: replace(whole, head=None))
    checkpoint = Checkpoint.open(path)
    assert checkpoint.mtp == MtpStatus(announced=False, present=False, missing=())
    shown = report(checkpoint)
    assert not shown["mtp"]["complete"] and not shown["unknown_tensors"] and shown["parameters"] > 0
    costs = model_costs(checkpoint)
    assert costs.draft_seconds == costs.head_kv_bytes == costs.head_state_bytes == 0
    stage = load_stage(checkpoint, Span(0, checkpoint.config.num_layers), first=True, last=True, dtype=None)
    assert stage.head is None
    assert not convert(checkpoint, tmp_path / "out", Settings()).has_head
    assert fetched_if_possible(path, lambda done, total: None) == path
    assert effective_mtp_mode(checkpoint, AUTO).depth == 0
    with pytest.raises(UsageError, match="which this family does not have"):
        effective_mtp_mode(checkpoint, MtpMode(1))
    with pytest.raises(UsageError, match="have no MTP head"):
        plan_head_addition(Checkpoint.open(tmp_path / "out"), other)
