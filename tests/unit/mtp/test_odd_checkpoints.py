"""Checkpoints of older or faulty exporters: extra tensors, adapter files and RoPE fields at their old place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from coordinator.schedule.request import GenerationRequest
from mtp.checkpoint.convert.convert import Settings, convert
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ModelConfig
from proto.errors import CheckpointError
from tests.support.checkpoints.checkpoints import edit_config, edit_tensors, write_checkpoint
from tests.support.stages.local_run import run

pytestmark = pytest.mark.thorough

LAYER = "model.language_model.layers.3"
HARMLESS = (
    "model.language_model.rotary_emb.inv_freq",
    f"{LAYER}.self_attn.rotary_emb.inv_freq",
    f"{LAYER}.self_attn.k_scale",
    f"{LAYER}.self_attn.v_scale",
)
HARMFUL = (f"{LAYER}.self_attn.k_proj.weight_scale", f"{LAYER}.mlp.up_proj.lora_a")


def with_tensors(path: Path, *names: str) -> Path:
    """Write a small checkpoint with the additional tensors `names`."""
    write_checkpoint(path, layers=4)
    edit_tensors(path, lambda tensors: tensors.update({n: mx.full((4,), 3.0) for n in names}))
    return path


def tokens_of(path: Path) -> tuple[int, ...]:
    """Return the greedy answer of the checkpoint to a fixed prompt."""
    (answer,) = run(path, [GenerationRequest(tuple(range(2, 22)), 12)])
    return answer.tokens


def test_harmless_extra_tensors_are_ignored(tmp_path: Path) -> None:
    """The answer is that of the checkpoint without the extra tensors."""
    plain = write_checkpoint(tmp_path / "plain", layers=4)
    path = with_tensors(tmp_path / "extra", *HARMLESS, "language_model.vision_tower.norm.weight")
    checkpoint = Checkpoint.open(path)
    assert checkpoint.ignored == tuple(sorted(HARMLESS))
    assert checkpoint.unknown == ()
    assert tokens_of(path) == tokens_of(plain)


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_extra_tensors_are_refused(tmp_path: Path, name: str) -> None:
    """A scale of weights or an adapter in the model's own files changes results, so loading refuses it by name."""
    path = with_tensors(tmp_path / "extra", name)
    with pytest.raises(CheckpointError, match=name.rpartition(".")[2]):
        tokens_of(path)


@pytest.mark.parametrize("file", ["adapters.safetensors", "0000100_adapters.safetensors"])
def test_an_adapter_file_is_no_part_of_the_model(tmp_path: Path, file: str) -> None:
    """Adapters of mlx-lm beside a model without an index are not read, as in mlx-lm."""
    path = write_checkpoint(tmp_path / "model", layers=4)
    mx.save_safetensors(str(path / file), {f"{LAYER}.mlp.up_proj.lora_a": mx.ones((2, 2))})
    checkpoint = Checkpoint.open(path)
    assert {info.file.name for info in checkpoint.tensors.values()} == {"model.safetensors"}


OLD_ROPE: list[dict[str, Any]] = [
    {"rope_theta": 20000.0, "rope_scaling": None, "partial_rotary_factor": 0.5},
    {"rope_theta": 20000.0},
    {"rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {
        "rope_theta": 20000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
]


@pytest.mark.parametrize("old", OLD_ROPE, ids=str)
def test_rope_fields_at_their_old_place_mean_what_transformers_reads(tmp_path: Path, old: dict[str, Any]) -> None:
    """`rope_theta` and `rope_scaling` give the parameters that transformers builds from them."""
    transformers = pytest.importorskip("transformers")
    path = with_old_rope(tmp_path / "old", old)
    expected = transformers.AutoConfig.from_pretrained(path).text_config.rope_parameters
    found = ModelConfig.load(path).text_config["rope_parameters"]
    assert {name: found[name] for name in expected} == expected


def test_a_conversion_moves_rope_fields_to_their_present_place(tmp_path: Path) -> None:
    """Stock mlx-lm reads `rope_parameters` only, so the converted config has them."""
    path = with_old_rope(tmp_path / "old", OLD_ROPE[2])
    convert(Checkpoint.open(path), tmp_path / "new", Settings())
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    rope = config["text_config"]["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 2.0, 20000.0)
    assert tokens_of(tmp_path / "new") == tokens_of(path)


def with_old_rope(path: Path, old: dict[str, Any]) -> Path:
    """Write a small checkpoint whose config has the RoPE fields `old` in place of `rope_parameters`."""
    write_checkpoint(path, layers=4)
    edit_config(path, lambda config: config["text_config"].pop("rope_parameters"))
    edit_config(path, lambda config: config["text_config"].update(old))
    return path
