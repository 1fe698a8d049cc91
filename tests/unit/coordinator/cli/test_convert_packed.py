"""Packed checkpoints on the command line: what `convert`, `serve` and `inspect` say about them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from coordinator.cli import import_command
from mtp.checkpoint.convert.foreign import open_source
from mtp.checkpoint.format.checkpoint import Checkpoint, model_name
from mtp.checkpoint.format.config import ModelConfig
from proto.errors import CheckpointError
from tests.support.checkpoints.checkpoints import edit_config, edit_tensors, read_tensors
from tests.support.checkpoints.foreign import write_foreign
from worker.node.node import LocalModels

MODULE = "model.language_model.layers.3.self_attn.q_proj"


def command(name: str, *args: str | Path) -> None:
    """Run a command in this process."""
    import_command(name).main([str(arg) for arg in args], standalone_mode=False)


def test_integers_keep_their_codes_and_all_else_follows_the_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of 4 bits are not quantized again in 8."""
    source = write_foreign(tmp_path / "source", "GPTQ")
    flags = ("-q", "--q-bits", "8")
    command("convert", "--hf-path", source, "--mlx-path", tmp_path / "plain")
    command("convert", "--hf-path", source, "--mlx-path", tmp_path / "asked", *flags)
    said = capsys.readouterr().out
    assert "MTP head: kept" in said
    plain, asked = read_tensors(tmp_path / "plain"), read_tensors(tmp_path / "asked")
    name = "language_model.model.layers.3.self_attn.q_proj"
    for leaf in ("weight", "scales", "biases"):
        assert mx.array_equal(plain[f"{name}.{leaf}"], asked[f"{name}.{leaf}"])
    embedding = "language_model.model.embed_tokens.scales"
    assert embedding in asked and embedding not in plain
    blocks = write_foreign(tmp_path / "blocks", "FP8 in blocks")
    command("convert", "--hf-path", blocks, "--mlx-path", tmp_path / "anew", *flags)
    assert f"{name}.scales" in read_tensors(tmp_path / "anew")


@pytest.mark.parametrize("form", ["AutoRound", "FP8 in blocks"])
def test_the_head_of_a_packed_checkpoint_is_added(tmp_path: Path, form: str) -> None:
    """`add-mtp` dequantizes the head, whatever its format, and packs it like the model."""
    source = write_foreign(tmp_path / "source", form)
    command("convert", "--hf-path", source, "--mlx-path", tmp_path / "model", "-q")
    head = tmp_path / "model" / "mtp.safetensors"
    converted = mx.load(str(head))
    head.unlink()
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.unlink()
    command("add-mtp", "--mlx-path", tmp_path / "model", "--hf-path", source)
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert checkpoint.mtp.complete
    added = mx.load(str(head))
    assert isinstance(converted, dict) and isinstance(added, dict)
    assert "language_model.mtp.layers.0.mlp.up_proj.scales" in added
    if form != "AutoRound":  # a conversion keeps its codes
        assert added.keys() == converted.keys()
        assert all(mx.array_equal(added[name], converted[name]) for name in added)


@pytest.mark.parametrize("program", ["serve", "generate", "plan", "inspect"])
def test_programs_that_compute_name_the_command_that_converts(tmp_path: Path, program: str) -> None:
    """A packed checkpoint is refused with its packing and the exact command."""
    source = write_foreign(tmp_path / "source", "GPTQ")
    arguments = {"generate": ["hello"], "plan": ["--nodes", "2", "--memory", "8GB"]}.get(program, [])
    with pytest.raises(CheckpointError) as refused:
        command(program, "--model", source, *arguments)
    said = str(refused.value)
    typed = f"convert --hf-path {source} --mlx-path source-mlx -q --q-bits 8"
    expected = "is packed as GPTQ, which is not served directly. Convert it once: mtp-coord"
    assert said == f"{source}: {expected} {typed}"


def test_the_command_in_the_error_of_a_worker_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mtp-worker --model` shows the same command, and its output is servable with its head."""
    source = write_foreign(tmp_path / "source", "AutoRound")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is packed as AutoRound, which is not") as refused:
        LocalModels(source).open(source)
    _, _, typed = str(refused.value).partition("mtp-coord ")
    command(*typed.split())
    checkpoint, _ = LocalModels(Path("source-mlx")).open(Path("source-mlx"))
    assert checkpoint.mtp.complete


def test_the_command_names_the_repo(tmp_path: Path) -> None:
    """For a repo in the hub's cache, the command has the repo's name and not the path of its snapshot."""
    path = tmp_path / "models--Qwen--Qwen3.5-27B-FP8" / "snapshots" / "0123abcd"
    write_foreign(path, "FP8 in blocks")
    expected = "mtp-coord convert --hf-path Qwen/Qwen3.5-27B-FP8 --mlx-path Qwen3.5-27B-FP8-mlx -q --q-bits 8"
    with pytest.raises(CheckpointError, match=expected):
        Checkpoint.open(path)
    assert model_name(tmp_path) == str(tmp_path)


@pytest.mark.parametrize("leaf", ["pre_quant_scale", "weight_zero_point", "lora_a"])
def test_a_scale_that_changes_results_is_refused(tmp_path: Path, leaf: str) -> None:
    """A packed weight with a further tensor, such as the inputs' scale of ModelOpt, is refused by its name."""
    source = write_foreign(tmp_path / "source", "AutoRound")
    extra = f"{MODULE}.{leaf}"
    edit_tensors(source, lambda tensors: tensors.update({extra: mx.ones((64,), mx.float16)}))
    with pytest.raises(CheckpointError, match=leaf):
        command("convert", "--hf-path", source, "--mlx-path", tmp_path / "out")


@pytest.mark.parametrize(("leaf", "renamed"), [("scales", ""), ("qweight", "weight_packed")])
def test_a_missing_or_unknown_member_is_refused(tmp_path: Path, leaf: str, renamed: str) -> None:
    """A packed weight without its scales, and a packing that is not read, are one error that names the tensors."""
    source = write_foreign(tmp_path / "source", "AutoRound")

    def change(tensors: dict[str, mx.array]) -> None:
        removed = tensors.pop(f"{MODULE}.{leaf}")
        tensors.update({f"{MODULE}.{renamed}": removed} if renamed else {})

    edit_tensors(source, change)
    with pytest.raises(CheckpointError, match=f"{MODULE}.*incomplete.*unquantized checkpoint"):
        command("convert", "--hf-path", source, "--mlx-path", tmp_path / "out")


@pytest.mark.parametrize("place", ["text_config", "hf_quant_config.json"])
def test_settings_are_found_at_every_place(tmp_path: Path, place: str) -> None:
    """Exporters write the quantization into the text part, or into a file of its own."""
    name = "ModelOpt" if place.endswith(".json") else "compressed-tensors"
    source = write_foreign(tmp_path / "source", f"NVFP4 of {name}")
    config = json.loads((source / "config.json").read_text())
    found = config.pop("quantization_config")
    if place == "text_config":
        config["text_config"]["quantization_config"] = found
    else:
        beside = {"producer": {"name": "modelopt"}, "quantization": found}
        (source / place).write_text(json.dumps(beside))
    (source / "config.json").write_text(json.dumps(config))
    foreign = ModelConfig.load(source).foreign
    assert foreign is not None
    assert foreign.name == name
    command("convert", "--hf-path", source, "--mlx-path", tmp_path / "out", "-q")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["quantization"]["mode"] == "affine"
    assert "quantization_config" not in written["text_config"]
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("NVFP4 of compressed-tensors", {"transform_config": {"config_groups": {"a": {}}}}),
        ("GPTQ", {"checkpoint_format": "marlin"}),
        ("GPTQ", {"quant_method": "awq"}),
    ],
)
def test_a_quantization_that_changes_results_is_refused(tmp_path: Path, form: str, change: dict[str, object]) -> None:
    """A quantization that cannot be read is one error that names config.json."""
    source = write_foreign(tmp_path / "source", form)
    edit_config(source, lambda config: config["quantization_config"].update(change))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_source(source)
