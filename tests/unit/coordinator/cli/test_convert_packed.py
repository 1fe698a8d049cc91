"""Packed checkpoints on the command line: what `convert`, `serve` and `inspect` say about them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import mlx.core as mx
import pytest

from coordinator.cli import import_command
from mtp.checkpoint.format.checkpoint import Checkpoint, model_name
from mtp.checkpoint.format.config import ModelConfig
from proto.errors import CheckpointError
from tests.support.checkpoints.checkpoints import read_tensors
from tests.support.checkpoints.foreign import FORMATS, write_foreign


def command(name: str, *args: str | Path) -> None:
    """Run a command in this process."""
    import_command(name).main([str(arg) for arg in args], standalone_mode=False)


def test_a_conversion_says_how_each_weight_got_its_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output counts the repacked weights and those quantized anew, with the added error."""
    source = write_foreign(tmp_path / "source", "NVFP4 of ModelOpt")
    command("convert", "--hf-path", source, "--mlx-path", tmp_path / "same")
    said = capsys.readouterr().out
    assert "33 weights repacked in 4 bit nvfp4, adding an error of 0\n" in said
    assert "stock mlx-lm cannot load" in said
    flags = ("-q", "--q-bits", "8")
    command("convert", "--hf-path", source, "--mlx-path", tmp_path / "anew", *flags)
    said = capsys.readouterr().out
    assert "32 weights quantized anew in 8 bit affine, adding an error of 0.5" in said
    assert "1 weights dequantized to float16" in said
    assert "stock mlx-lm cannot load" not in said


def test_flags_that_ask_for_the_same_format_keep_the_bits(tmp_path: Path) -> None:
    """A repacked weight is not quantized again when the flags name its own bits and group size."""
    source = write_foreign(tmp_path / "source", "GPTQ 4 bit")
    command("convert", "--hf-path", source, "--mlx-path", tmp_path / "kept")
    flags = ("-q", "--q-bits", "4", "--q-group-size", "32")
    command("convert", "--hf-path", source, "--mlx-path", tmp_path / "asked", *flags)
    kept, asked = read_tensors(tmp_path / "kept"), read_tensors(tmp_path / "asked")
    name = "language_model.model.layers.3.self_attn.q_proj"
    for leaf in ("weight", "scales", "biases"):
        assert mx.array_equal(kept[f"{name}.{leaf}"], asked[f"{name}.{leaf}"])
    embedding = "language_model.model.embed_tokens.scales"
    assert embedding in asked and embedding not in kept


def test_the_head_of_a_packed_checkpoint_is_added(tmp_path: Path) -> None:
    """`add-mtp` dequantizes the head, whatever its format, and packs it like the model."""
    source = write_foreign(tmp_path / "source", "AWQ")
    command("convert", "--hf-path", source, "--mlx-path", tmp_path / "model", "-q")
    (tmp_path / "model" / "mtp.safetensors").unlink()
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.unlink()
    command("add-mtp", "--mlx-path", tmp_path / "model", "--hf-path", source)
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert checkpoint.mtp.complete
    assert "language_model.mtp.layers.0.mlp.up_proj.scales" in checkpoint.tensors


def test_inspect_names_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report of a packed checkpoint has its method, its bits by part, and its size in memory."""
    source = write_foreign(tmp_path / "source", "GPTQ 8 bit asymmetric")
    command("inspect", source, "--no-trial", "--json")
    facts = json.loads(capsys.readouterr().out)
    assert facts["packed_by"] == "gptq"
    assert facts["packed"]["mtp"] == {"8 bit": 8}
    assert facts["bytes"]["total"] == sum(Checkpoint.open(source).part_bytes().values())
    command("inspect", source, "--no-trial")
    assert "gptq, repacked for MLX while loading" in capsys.readouterr().out


def test_serving_names_the_repo_in_the_command_that_converts(tmp_path: Path) -> None:
    """For a repo in the hub's cache, the command has the repo's name and not the path of its snapshot."""
    path = tmp_path / "models--Qwen--Qwen3.5-27B-FP8" / "snapshots" / "0123abcd"
    write_foreign(path, "FP8 in blocks")
    expected = (
        "mtp-coord convert --hf-path Qwen/Qwen3.5-27B-FP8 "
        "--mlx-path Qwen3.5-27B-FP8-8bit -q --q-bits 8"
    )
    with pytest.raises(CheckpointError, match=expected):
        Checkpoint.open(path)
    assert model_name(tmp_path) == str(tmp_path)


def test_scales_of_activations_are_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Activations are not quantized here, so their scales change nothing. One warning lists them."""
    source = write_foreign(tmp_path / "source", "NVFP4 of compressed-tensors")
    with caplog.at_level(logging.WARNING):
        checkpoint = Checkpoint.open(source)
        Checkpoint.open(source)
    (record,) = caplog.records
    assert "input_global_scale" in vars(record)["tensors"]
    assert len(checkpoint.ignored) == 33


@pytest.mark.parametrize("leaf", ["pre_quant_scale", "weight_zero_point_2", "lora_a"])
def test_a_scale_that_changes_results_is_refused(tmp_path: Path, leaf: str) -> None:
    """A packed weight with a further tensor, such as AWQ's scale of the inputs in ModelOpt, is refused by its name."""
    source = write_foreign(tmp_path / "source", "MXFP4")
    file = source / "model.safetensors"
    extra = "model.language_model.layers.3.self_attn.q_proj." + leaf
    tensors = read_tensors(source) | {extra: mx.ones((64,), mx.float16)}
    mx.save_safetensors(str(file), tensors, {"format": "pt"})
    with pytest.raises(CheckpointError, match=leaf):
        command("convert", "--hf-path", source, "--mlx-path", tmp_path / "out")


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    """A packed weight without its scales is an incomplete download."""
    source = write_foreign(tmp_path / "source", "AWQ")
    tensors = read_tensors(source)
    name = "model.language_model.layers.3.self_attn.q_proj.scales"
    del tensors[name]
    mx.save_safetensors(str(source / "model.safetensors"), tensors, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        command("convert", "--hf-path", source, "--mlx-path", tmp_path / "out")


@pytest.mark.parametrize("place", ["text_config", "compression_config", "hf_quant_config.json"])
def test_settings_are_found_at_every_place(tmp_path: Path, place: str) -> None:
    """Exporters write the quantization into the text part, under an older name, or into a file of its own."""
    form = "NVFP4 of ModelOpt" if place.endswith(".json") else "NVFP4 of compressed-tensors"
    source = write_foreign(tmp_path / "source", form)
    config = json.loads((source / "config.json").read_text())
    found = config.pop("quantization_config")
    if place == "text_config":
        config["text_config"]["quantization_config"] = found
    elif place == "compression_config":
        config["compression_config"] = {k: v for k, v in found.items() if k != "quant_method"}
    else:
        beside = {"producer": {"name": "modelopt"}, "quantization": found}
        (source / place).write_text(json.dumps(beside))
    (source / "config.json").write_text(json.dumps(config))
    foreign = ModelConfig.load(source).foreign
    assert foreign is not None
    assert foreign.method == FORMATS[form][1]["quant_method"]
    assert Checkpoint.open(source).unservable() == ()
    command("convert", "--hf-path", source, "--mlx-path", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["quantization"]["mode"] == "nvfp4"
    assert "compression_config" not in written
    assert "quantization_config" not in written["text_config"]
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("W4A16", {"config_groups": {"a": {"weights": {"num_bits": "four"}}}}),
        ("W4A16", {"config_groups": {"a": {"targets": ["re:("]}, "b": {"targets": 3}}}),
        ("GPTQ 4 bit", {"dynamic": {"+:(": {"bits": 8}}}),
        ("GPTQ 4 bit", {"bits": [4]}),
    ],
)
def test_an_invalid_quantization_is_refused(
    tmp_path: Path, form: str, change: dict[str, object]
) -> None:
    """A quantization that cannot be read is one error that names config.json."""
    source = write_foreign(tmp_path / "source", form)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= change
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(source)
