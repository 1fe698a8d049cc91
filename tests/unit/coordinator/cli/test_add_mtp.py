"""`mtp-coord add-mtp` gives the same checkpoint as a conversion that keeps the head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from coordinator.cli import import_command
from mtp.checkpoint.convert.convert import Quantization, Settings, convert
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import is_head
from mtp.checkpoint.format.parts import read_part
from proto.errors import CheckpointError, UsageError
from proto.span import Span
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import (
    assert_same_tensors,
    edit_tensors,
    head_of,
    read_tensors,
    write_checkpoint,
)
from tests.support.checkpoints.hub import Hub
from worker.model.loader import load_stage

pytestmark = pytest.mark.thorough

REPO = "someone/some-model"
HEADS: list[dict[str, Any]] = [
    {},
    {"moe": True, "fused_mtp_experts": True},
    {"moe": True, "fused_mtp_experts": False, "shards": 4},
    {"moe": True, "qwen3_next": True},
]
each_head = pytest.mark.parametrize("options", HEADS, ids=repr)


def add(target: Path, source: str | Path, *flags: str) -> None:
    args = ["--mlx-path", str(target), "--hf-path", str(source), *flags]
    import_command("add-mtp").main(args, standalone_mode=False)


def stripped(source: Path, path: Path, settings: Settings) -> Path:
    """Return a conversion without a head whose config.json announces one, like most published ones."""
    convert(Checkpoint.open(source), path, settings, shard_bytes=500_000)
    (path / "mtp.safetensors").unlink()
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {n: f for n, f in content["weight_map"].items() if not is_head(n)}
    index.write_text(json.dumps(content))
    config = json.loads((path / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        if key in config:
            config[key] = {n: v for n, v in config[key].items() if not is_head(n)}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path


def says(path: Path) -> list[Any]:
    """Return the content of config.json and of the index. A quantization without a mode is affine."""
    config = json.loads((path / "config.json").read_text())
    for value in config.get("quantization", {}).values():
        if isinstance(value, dict):
            value.setdefault("mode", "affine")
    config.pop("quantization_config", None)
    return [config, json.loads((path / "model.safetensors.index.json").read_text())]


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("quantization", [None, Quantization(4, 64), Quantization(4, 32, "mxfp4")])
@each_head
def test_the_result_is_that_of_a_conversion_that_keeps_it(
    checkpoints: Checkpoints,
    tmp_path: Path,
    options: dict[str, Any],
    quantization: Quantization | None,
) -> None:
    """The tensors have the same bits and packing as in a full conversion, and the model's own files do not change."""
    source, settings = checkpoints(**options), Settings(quantization)
    target = stripped(source, tmp_path / "target", settings)
    before = content(target)
    add(target, source)
    convert(Checkpoint.open(source), tmp_path / "kept", settings, shard_bytes=500_000)
    assert_same_tensors(read_tensors(target), read_tensors(tmp_path / "kept"))
    after = content(target)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"mtp.safetensors", "config.json", "model.safetensors.index.json"} - (
        {"config.json"} if quantization is None or "moe" not in options else set()
    )
    assert says(target) == says(tmp_path / "kept")


def test_a_recipe_of_mlx_lm_is_followed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Each module of the head is packed like the same module of the last attention layer."""
    source = checkpoints()
    target = tmp_path / "target"
    model, config = load_model(source)
    recipe: Any = mixed_quant_predicate_builder("mixed_3_6", model, 64)
    model, config = quantize_model(model, config, 64, 4, quant_predicate=recipe)
    save_model(target, model)
    save_config(config, target / "config.json")
    add(target, source)
    checkpoint = Checkpoint.open(target)
    head, layer = head_of(checkpoint), read_part(checkpoint, "layers.7", None)
    for name in (n for n in layer if n.endswith("weight")):
        assert head[f"layers.0.{name}"].shape == layer[name].shape
    assert head["fc.weight"].dtype == mx.float32
    load_stage(Checkpoint.open(target), Span(7, 8), first=False, last=True, dtype=None)


def test_a_checkpoint_of_mlx_lms_own_and_a_float16_one(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A single file gets an index, the head gets the model's type, and mlx-lm loads both."""
    source = checkpoints()
    one_file = tmp_path / "one"
    shutil.copytree(checkpoints(mtp=False, layout="mlx", quantize=4), one_file)
    before = load_model(one_file)[0](mx.array([[1, 2, 3]]))
    add(one_file, source)
    assert Checkpoint.open(one_file).mtp.complete
    assert mx.array_equal(load_model(one_file)[0](mx.array([[1, 2, 3]])), before)
    half = stripped(source, tmp_path / "half", Settings(dtype="float16"))
    add(half, source)
    assert {weight.dtype for weight in head_of(Checkpoint.open(half)).values()} == {mx.float16}


def test_an_already_converted_source_is_not_shifted_again(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Raw and converted sources, packed or not, give the same head."""
    source = checkpoints()
    for number, (quantize, settings) in enumerate([(None, Settings()), (4, Settings(Quantization(4, 64)))]):
        target = stripped(source, tmp_path / f"target {number}", settings)
        add(target, checkpoints(layout="mlx", quantize=quantize))
        expected = Checkpoint.open(checkpoints(layout="mlx", quantize=quantize))
        assert_same_tensors(head_of(Checkpoint.open(target)), head_of(expected))


# ---- refusals


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden": 128}, "hidden_size is 128 there and 64 here"),
        ({"vocab": 512}, "vocab_size is 512 there and 256 here"),
        ({"moe": True}, "intermediate_size is"),
        ({"mtp": False}, "no complete MTP head"),
    ],
)
def test_a_head_that_does_not_fit(
    checkpoints: Checkpoints, tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    """A head of another model is refused before anything is written."""
    target = stripped(checkpoints(), tmp_path / "target", Settings())
    before = content(target)
    with pytest.raises(CheckpointError, match=message):
        add(target, checkpoints(**other))
    assert content(target) == before


def test_shapes_are_checked_beyond_the_config(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A source whose config.json contradicts its tensors is refused."""
    source = write_checkpoint(tmp_path / "raw")
    fc = "mtp.fc.weight"
    edit_tensors(source, lambda weights: weights.update({fc: weights[fc][:, :64]}))
    target = stripped(checkpoints(), tmp_path / "target", Settings())
    before = content(target)
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight"):
        add(target, source)
    assert content(target) == before


def test_a_wrong_head_is_replaced(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A head with raw norms under other names is replaced by the new one."""
    source = checkpoints()
    target = tmp_path / "target"
    shutil.copytree(checkpoints(layout="mlx", quantize=4, mtp=False), target)
    raw = {n: w for n, w in read_tensors(source).items() if is_head(n) and "fc" not in n}
    edit_tensors(target, lambda weights: weights.update(raw), "mlx")
    with pytest.raises(UsageError, match=r"has a part of an MTP head already\. Use --replace"):
        add(target, source)
    add(target, source, "--replace")
    expected = Checkpoint.open(checkpoints(layout="mlx", quantize=4))
    assert_same_tensors(head_of(Checkpoint.open(target)), head_of(expected))


# ---- from a hub


@each_head
def test_of_a_hub_repo_only_the_head_is_read(
    checkpoints: Checkpoints,
    tmp_path: Path,
    hub: Hub,
    options: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command downloads the head's tensors, and the headers of their files and of one other file."""
    source = checkpoints(**options)
    hub.add(REPO, source)
    settings = Settings(Quantization(4, 64))
    target = stripped(source, tmp_path / "target", settings)
    add(target, REPO)
    assert not (target / "mtp-source").exists()
    told = capsys.readouterr().out
    expected = tmp_path / "expected"
    add(stripped(source, expected, settings), source)
    assert content(target) == content(expected)
    tensors = Checkpoint.open(source).tensors
    size = sum(info.nbytes for name, info in tensors.items() if is_head(name))
    assert f"downloaded from {REPO}: {size / 1000:.3g} kB" in told
    headers = sum(int.from_bytes(file.read_bytes()[:8], "little") + 9 for file in source.glob("*.safetensors"))
    assert size < hub.weights_sent <= size + headers
