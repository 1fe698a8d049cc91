"""Conversion: the output has the weights of the source in mlx layout, with the head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.utils import load_model, quantize_model

from mtp.builtin import checkpoint_dir
from mtp.checkpoint.convert.convert import convert
from mtp.checkpoint.convert.settings import Mode, Quantization, Settings
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.lazy_weights import read_part
from mtp.checkpoint.format.names import local_name
from proto.errors import CheckpointError, UsageError
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import Weights, read_tensors, write_checkpoint

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


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype, name
        assert mx.array_equal(found[name], weight), name


@each_source
def test_unquantized_output_is_the_source_to_the_bit(
    checkpoints: Checkpoints, tmp_path: Path, options: dict[str, Any]
) -> None:
    """An unquantized conversion has equal parameters, the head's included, and equal logits in stock mlx-lm."""
    source = checkpoints(**options)
    out = converted(source, tmp_path / "out")
    assert Checkpoint.open(out).layout == "mlx"
    assert Checkpoint.open(out).mtp.complete
    assert_same(parameters(out), parameters(source))
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
    assert_same(local(read_tensors(out)), local(read_tensors(expected)))
    assert_same(parameters(out), parameters(expected))


def test_a_quantized_model_is_near_its_source(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """No weight differs by more than one step of its group, and 8-bit logits are close."""
    source = checkpoints(tie=False)  # in a tiny mixture another rounding selects other experts
    out = converted(source, tmp_path / "out", Settings(Quantization.of(8, None)))
    original, packed = parameters(source), parameters(out)
    quantized = [name for name in packed if name.endswith(".scales")]
    assert len(quantized) == 2 + 8 * 3 + 6 * 5 + 2 * 4 + 7
    for name in quantized:
        weight, scales, biases = (
            packed[name.replace("scales", kind)] for kind in ("weight", "scales", "biases")
        )
        unpacked = mx.dequantize(weight, scales, biases, group_size=64, bits=8)
        error = mx.abs(unpacked - original[name.replace("scales", "weight")])
        steps = error.reshape(*scales.shape, 64).max(axis=-1) / mx.abs(scales)
        assert mx.max(steps) <= 1.0, name
    logits = load_model(source)[0](TOKENS)
    difference = load_model(out)[0](TOKENS) - logits
    assert mx.linalg.norm(difference) < 0.15 * mx.linalg.norm(logits)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_other_modes_are_mlx_lms(checkpoints: Checkpoints, tmp_path: Path, mode: Mode) -> None:
    """The tensors and the entries in config.json equal those of `mlx_lm.convert --q-mode`."""
    source = checkpoints(moe=True)
    out = converted(source, tmp_path / "out", Settings(Quantization.of(None, None, mode)))
    model, config = load_model(source)
    model, config = quantize_model(model, config, None, None, mode=mode)
    assert_same_backbone(out, model, config)


def test_a_recipe_is_mlx_lms(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """mlx-lm's recipe chooses the bits of each weight; the head is treated as layer 0."""
    source = checkpoints()
    settings = Settings(Quantization.of(None, None), recipe="mixed_3_6")
    out = converted(source, tmp_path / "out", settings)
    model, config = load_model(source)
    recipe: Any = mixed_quant_predicate_builder("mixed_3_6", model, 64)
    model, config = quantize_model(model, config, 64, 4, quant_predicate=recipe)
    assert_same_backbone(out, model, config)
    found = Checkpoint.open(out).config.quantization
    assert found is not None
    head = "language_model.mtp.layers.0"
    assert found[f"{head}.self_attn.v_proj"]["bits"] == 6
    assert found[f"{head}.self_attn.q_proj"]["bits"] == 3


def assert_same_backbone(out: Path, model: Any, config: dict[str, Any]) -> None:
    stored = read_tensors(out)
    backbone = {name: weight for name, weight in stored.items() if ".mtp." not in name}
    assert_same(backbone, dict(tree_flatten(model.parameters())))
    found = json.loads((out / "config.json").read_text())["quantization"]
    assert {name: value for name, value in found.items() if ".mtp." not in name} == config[
        "quantization"
    ]
    assert mx.array_equal(load_model(out)[0](TOKENS), model(TOKENS))


def test_routers_keep_8_bits_under_a_recipe(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Routers keep 8 bits where mlx-lm's recipes would use 3."""
    settings = Settings(Quantization.of(None, None), recipe="mixed_3_4")
    out = converted(checkpoints(moe=True), tmp_path / "out", settings)
    found = Checkpoint.open(out).config.quantization
    assert found is not None
    routers = [name for name in found if name.endswith(("mlp.gate", "shared_expert_gate"))]
    assert len(routers) == 2 * 9
    assert all(found[name]["bits"] == 8 for name in routers)


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize(("head_bits", "bits"), [("none", None), ("8", 8)])
def test_the_head_has_bits_of_its_own(
    checkpoints: Checkpoints, tmp_path: Path, moe: bool, head_bits: Any, bits: int | None
) -> None:
    """`--mtp-bits` is for the head's layer alone; `fc` and norms are never quantized."""
    settings = Settings(Quantization.of(4, None), head_bits=head_bits)
    weights = parameters(converted(checkpoints(moe=moe), tmp_path / "out", settings))
    head = {name: weight for name, weight in weights.items() if name.startswith("mtp.")}
    packed = [name for name in head if name.endswith("scales")]
    assert len(packed) == (0 if bits is None else 12 if moe else 7)
    assert head["mtp.fc.weight"].dtype == mx.float32
    if bits is not None:
        assert head["mtp.layers.0.self_attn.q_proj.weight"].shape[-1] == 64 * bits // 32
    assert weights["layers.3.self_attn.q_proj.weight"].shape[-1] == 64 * 4 // 32


def test_a_quantized_head_beside_an_unquantized_backbone(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """`--mtp-bits` without `-q`: mlx-lm sees an unquantized model, we see the head packed."""
    source = checkpoints()
    out = converted(source, tmp_path / "out", Settings(head_bits="4"))
    assert "mtp.layers.0.mlp.up_proj.scales" in parameters(out)
    assert mx.array_equal(load_model(out)[0](TOKENS), load_model(source)[0](TOKENS))


def test_dtypes(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """`--dtype` and `--mtp-dtype` cast what is not packed; `A_log` is computed with in float32."""
    settings = Settings(dtype="float16", head_dtype="bfloat16")
    for name, weight in parameters(converted(checkpoints(), tmp_path / "out", settings)).items():
        if name.endswith("A_log"):
            assert weight.dtype == mx.float32
        else:
            assert weight.dtype == (mx.bfloat16 if name.startswith("mtp.") else mx.float16), name


def test_an_mlx_source_without_quantization_is_taken(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Converting a checkpoint in mlx layout does not shift its norms again."""
    source = checkpoints(layout="mlx")
    assert_same(parameters(converted(source, tmp_path / "out")), parameters(source))


def test_the_head_lies_where_old_mlx_lm_does_not_look(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
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
    out = converted(source, tmp_path / "out")
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "mlx", "quantize": 4}, "is quantized already"),
    ],
)
def test_sources_that_cannot_be_converted(
    checkpoints: Checkpoints, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """A refused conversion writes nothing."""
    with pytest.raises(CheckpointError, match=message):
        converted(checkpoints(**options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("renamed", "to", "message"),
    [
        ("mtp.fc.weight", None, r"mtp\.fc\.weight of the MTP head is missing"),
        ("mtp.fc.weight", "mtp.fd.weight", r"mtp\.fc\.weight of the MTP head is missing"),
        (
            "model.language_model.norm.weight",
            None,
            r"model\.safetensors: tensor model\.language_model\.norm\.weight is missing",
        ),
        ("model.language_model.norm.weight", "model.language_model.nrm.weight", "no part of"),
    ],
)
def test_sources_with_wrong_tensors(
    tmp_path: Path, renamed: str, to: str | None, message: str
) -> None:
    """A missing or unknown tensor is named, and nothing is written."""
    source = write_checkpoint(tmp_path / "raw")
    weights = read_tensors(source)
    weight = weights.pop(renamed)
    mx.save_safetensors(
        str(source / "model.safetensors"), weights | ({to: weight} if to else {}), {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        converted(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Quantization.of(7, None),
            "7 bits are not supported. Choose one of 2, 3, 4, 5, 6, 8",
        ),
        (lambda: Quantization.of(4, 48), "groups of 48"),
        (lambda: Quantization.of(8, None, "mxfp4"), "mxfp4 has 4 bits in groups of 32"),
        (lambda: Settings(recipe="mixed_3_6"), "needs --quantize"),
        (
            lambda: Settings(Quantization.of(None, None, "nvfp4"), recipe="mixed_3_6"),
            "--q-mode affine",
        ),
    ],
)
def test_settings_that_mean_nothing(make: Any, message: str) -> None:
    """Invalid settings are refused before anything is read."""
    with pytest.raises(UsageError, match=message):
        make()
