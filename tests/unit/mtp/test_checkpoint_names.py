"""Names: every published spelling of a tensor maps to its parameter, and heads have other names or own repos."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from coordinator.cli import import_command
from mtp.checkpoint.convert.convert import Settings, convert
from mtp.checkpoint.families.parameters import (
    Source,
    Transform,
    add_one,
    as_stored,
    gate_half,
    stack,
    swap_taps,
    up_half,
)
from mtp.checkpoint.families.qwen3_5 import Qwen35
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import (
    IGNORED,
    Layout,
    is_head,
    local_name,
    plan_part,
)
from proto.errors import CheckpointError
from proto.span import Span
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import (
    assert_same_tensors,
    edit_config,
    edit_tensors,
    head_of,
    move_head,
    read_tensors,
)
from worker.model.loader import load_stage


@pytest.mark.parametrize(
    ("stored", "local"),
    [
        ("model.language_model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("language_model.model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("model.language_model.embed_tokens.weight", "embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("mtp.fc.weight", "mtp.fc.weight"),
        ("language_model.mtp.fc.weight", "mtp.fc.weight"),
        ("model.visual.blocks.0.norm1.weight", None),
        ("vision_tower.blocks.0.norm1.weight", None),
    ],
)
def test_every_prefix_leads_to_one_local_name(stored: str, local: str | None) -> None:
    """Raw, converted and text-only spellings of a tensor have the same local name; vision has none."""
    assert local_name(stored) == local


@pytest.mark.parametrize(
    ("part", "within", "transform"),
    [
        ("layers.0", "input_layernorm.weight", add_one),
        ("layers.0", "post_attention_layernorm.weight", add_one),
        ("layers.3", "self_attn.q_norm.weight", add_one),
        ("layers.3", "self_attn.k_norm.weight", add_one),
        ("norm", "weight", add_one),
        ("mtp", "norm.weight", add_one),
        ("mtp", "pre_fc_norm_embedding.weight", add_one),
        ("mtp", "pre_fc_norm_hidden.weight", add_one),
        ("mtp", "layers.0.self_attn.q_norm.weight", add_one),
        ("layers.0", "linear_attn.conv1d.weight", swap_taps),
        ("layers.0", "linear_attn.norm.weight", as_stored),
        ("layers.0", "linear_attn.A_log", as_stored),
        ("layers.0", "mlp.up_proj.weight", as_stored),
        ("embed", "weight", as_stored),
        ("lm_head", "weight", as_stored),
    ],
)
def test_raw_tensors_are_changed_and_converted_ones_are_not(part: str, within: str, transform: Transform) -> None:
    """Raw norms but linear_attn.norm get +1, and conv1d is transposed; tensors in mlx layout stay as stored."""
    assert _plan(part, [within], "raw") == {within: Source((within,), transform)}
    assert _plan(part, [within], "mlx") == {within: Source((within,))}


def _plan(part: str, within: list[str], layout: Layout = "raw") -> dict[str, Source]:
    return plan_part(Qwen35(), part, [(name, name) for name in within], layout, num_experts=2)


def test_unfused_experts_become_one_stack_in_order_of_expert() -> None:
    """Experts stored one by one become switch_mlp stacked in order, for any order of the names."""
    names = [f"mlp.experts.{e}.{p}_proj.weight" for e in (1, 0) for p in ("gate", "up", "down")]
    plan = _plan("layers.0", names)
    assert plan == {
        f"mlp.switch_mlp.{p}_proj.weight": Source(tuple(f"mlp.experts.{e}.{p}_proj.weight" for e in (0, 1)), stack)
        for p in ("gate", "up", "down")
    }


def test_fused_experts_are_split_gate_first() -> None:
    """`gate_up_proj` holds gate, then up; `down_proj` is used whole."""
    assert _plan("mtp", ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"]) == {
        "layers.0.mlp.switch_mlp.gate_proj.weight": Source(("layers.0.mlp.experts.gate_up_proj",), gate_half),
        "layers.0.mlp.switch_mlp.up_proj.weight": Source(("layers.0.mlp.experts.gate_up_proj",), up_half),
        "layers.0.mlp.switch_mlp.down_proj.weight": Source(("layers.0.mlp.experts.down_proj",)),
    }


DEEPSEEK = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


def _one_layer(prefix: str, names: dict[str, str]) -> Callable[[str], str]:
    """Return a renaming that keeps the whole head in one layer `prefix`, with other `names` of its ends."""

    def rename(within: str) -> str:
        """Return the exporter's name of a tensor of the head."""
        module, _, rest = within.removeprefix("layers.0.").partition(".")
        module = names.get(module, module) if not within.startswith("layers.") else module
        return f"{prefix}{module}.{rest}"

    return rename


NAMINGS: dict[str, Callable[[str], str]] = {
    "mtp_layers": _one_layer("mtp_layers.0.", {}),
    "model.mtp_layers": _one_layer("model.mtp_layers.0.", {}),
    "nextn with a number": _one_layer("nextn.0.", DEEPSEEK),
    "nextn": _one_layer("nextn.", DEEPSEEK | {"norm": "shared_head_norm"}),
    "below the model": lambda within: f"language_model.mtp.{within}",
}


def head_alone(path: Path, source: Path, *, prefix: str, metadata: dict[str, str]) -> Path:
    """Write the head of `source` as a repo of its own, as drafter tools split it."""
    path.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["model_type"] = "qwen3_5_mtp"
    config["block_size"] = 3
    (path / "config.json").write_text(json.dumps(config))
    heads = {
        prefix + name.partition("mtp.")[2]: weight for name, weight in read_tensors(source).items() if is_head(name)
    }
    mx.save_safetensors(str(path / "model.safetensors"), heads, metadata)
    return path


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("options", [{}, {"moe": True}], ids=["dense", "experts"])
def test_a_head_under_another_name_is_the_same_head(
    checkpoints: Checkpoints, tmp_path: Path, options: dict[str, Any], naming: str
) -> None:
    """Opening, and so `serve` and `inspect`, finds the complete head, with equal weights and no unknown tensor."""
    source = checkpoints(**options)
    renamed = {
        NAMINGS[naming](name.removeprefix("mtp.")) if is_head(name) else name: weight
        for name, weight in read_tensors(source).items()
    }
    assert not any(name.startswith("mtp.") for name in renamed)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), renamed, {"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    found = Checkpoint.open(tmp_path)
    assert found.mtp.complete
    assert found.unknown == ()
    assert_same_tensors(head_of(found), head_of(Checkpoint.open(source)))


def raw_with_prefix(path: Path, checkpoints: Checkpoints) -> Path:
    return head_alone(path, checkpoints(), prefix="mtp.", metadata={})


def raw_without_prefix(path: Path, checkpoints: Checkpoints) -> Path:
    return head_alone(path, checkpoints(), prefix="", metadata={"format": "pt"})


def converted_without_prefix(path: Path, checkpoints: Checkpoints) -> Path:
    source = convert(Checkpoint.open(checkpoints()), path.with_suffix(".whole"), Settings()).path
    return head_alone(path, source, prefix="", metadata={})


ALONE = [raw_with_prefix, raw_without_prefix, converted_without_prefix]


@pytest.mark.parametrize("write", ALONE, ids=lambda write: write.__name__)
def test_add_mtp_takes_a_repo_of_a_head_alone(
    checkpoints: Checkpoints, tmp_path: Path, write: Callable[[Path, Checkpoints], Path]
) -> None:
    """The result has the head of the checkpoint that the head was split from. Norms are shifted once."""
    head = write(tmp_path / "head", checkpoints)
    target = convert(Checkpoint.open(checkpoints(mtp=False)), tmp_path / "target", Settings()).path
    options = ["--mlx-path", str(target), "--hf-path", str(head)]
    import_command("add-mtp").main(options, standalone_mode=False)
    found, expected = Checkpoint.open(target), Checkpoint.open(checkpoints(layout="mlx"))
    assert_same_tensors(head_of(found), head_of(expected))


def test_a_head_alone_is_no_model(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """`serve`, `inspect` and `convert` refuse it with the command to type."""
    head = raw_with_prefix(tmp_path / "head", checkpoints)
    command = f"holds an MTP head and no model.*add-mtp --mlx-path MODEL --hf-path {head}"
    for to_convert in (False, True):
        with pytest.raises(CheckpointError, match=command):
            Checkpoint.open(head, to_convert=to_convert)


@pytest.mark.parametrize(
    ("place", "prefix"),
    [
        ("mtp/weights.safetensors", "mtp."),
        ("optiq/mtp.safetensors", "language_model.mtp."),
        ("mtp/model.safetensors", ""),
        ("head.safetensors", ""),
    ],
)
@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("options", [{}, {"moe": True}], ids=["dense", "experts"])
def test_a_head_beside_the_model_is_found_by_its_tensors(
    checkpoints: Checkpoints,
    tmp_path: Path,
    options: dict[str, Any],
    index: bool,
    place: str,
    prefix: str,
) -> None:
    """Neither the folder nor the name of its file, nor the prefix of its tensors matters."""
    source = checkpoints(**options)
    found = Checkpoint.open(move_head(tmp_path / "moved", source, place, prefix, index=index))
    assert found.mtp.complete
    assert found.unknown == ()
    assert_same_tensors(head_of(found), head_of(Checkpoint.open(source)))


def test_the_file_of_the_head_that_config_names_comes_first(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Of two heads the one that `mlx_lm_extra_tensors.mtp_file` names is read, or else the nearest."""
    path = move_head(tmp_path / "two", checkpoints(), "mtp.safetensors", "mtp.")
    other = path / "optiq" / "mtp.safetensors"
    other.parent.mkdir()
    shutil.copy(path / "mtp.safetensors", other)
    place = {info.file for name, info in Checkpoint.open(path).tensors.items() if is_head(name)}
    assert place == {path / "mtp.safetensors"}
    edit_config(path, lambda c: c.update(mlx_lm_extra_tensors={"mtp_file": "optiq/mtp.safetensors"}))
    place = {info.file for name, info in Checkpoint.open(path).tensors.items() if is_head(name)}
    assert place == {other}


def test_a_whole_model_with_the_type_of_a_head_is_served(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The tensors decide, not the `model_type`."""
    path = shutil.copytree(checkpoints(), tmp_path / "whole")
    edit_config(path, lambda config: config.update(model_type="qwen3_5_mtp"))
    found = Checkpoint.open(path)
    assert not found.config.head_only
    assert found.mtp.complete


def test_of_a_head_of_two_layers_the_first_drafts(
    checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tensors of the second layer are ignored, and loading says so."""
    path = shutil.copytree(checkpoints(), tmp_path / "two layers")
    edit_config(path, lambda config: config["text_config"].update(mtp_num_hidden_layers=2))
    second = {
        name.replace("mtp.layers.0.", "mtp.layers.1."): weight
        for name, weight in read_tensors(path).items()
        if "mtp.layers.0." in name
    }
    edit_tensors(path, lambda weights: weights.update(second))
    found = Checkpoint.open(path)
    assert set(found.ignored) == set(second)
    whole = Span(0, found.config.num_layers)
    assert load_stage(found, whole, first=True, last=True, dtype=mx.float32).head is not None
    assert "drafts with its first layer" in caplog.text


def test_a_quantization_in_the_text_config_counts(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Some tools leave out the copy at the top."""
    path = shutil.copytree(checkpoints(layout="mlx", quantize=4), tmp_path / "inner")
    whole = Checkpoint.open(path).config.quantization

    def move(config: dict[str, Any]) -> None:
        config["text_config"]["quantization"] = config.pop("quantization")
        config.pop("quantization_config", None)

    edit_config(path, move)
    assert Checkpoint.open(path).config.quantization == whole


@pytest.mark.parametrize("name", ["k_proj.k_scale", "v_proj.v_scale", "k_scale", "kv_scale"])
def test_the_scales_of_stored_keys_are_ignored(name: str) -> None:
    """As ModelOpt's NVFP4 has them, in the projections, and as others have them."""
    assert IGNORED.fullmatch(f"model.layers.3.self_attn.{name}")
