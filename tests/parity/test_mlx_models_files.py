"""Checkpoints of mlx-lm's models: the stages that are read from files give the tokens of mlx-lm.

They are converted, quantized, the publisher's own, and a part of one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm import models
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from coordinator.cluster.served_model import WeightProvider
from mtp.checkpoint.convert.convert import Quantization, Settings, convert
from mtp.checkpoint.convert.foreign import open_source
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.known_repos import MLX_LM_MODELS
from mtp.layers.layer import KVFormat
from mtp.mlx_models.family import MlxLmFamily
from mtp.mlx_models.skeleton import make_model
from mtp.mlx_models.structure import structure_of
from mtp.mlx_models.tested_types import known_results
from mtp.mlx_models.trial import trial_problem
from mtp.mlx_models.weights import plan_tensors
from proto import cluster_pb2 as pb
from proto.errors import CheckpointError
from proto.span import Span
from tests.support.tiny_configs import MODEL_TYPES, tiny_config
from worker.model.loader import load_stage

PROMPT = [(7 * i + 1) % 100 for i in range(9)]
COUNT = 8
USUAL = ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "falcon_h1", "apertus", "nemotron_h")
OWN_CONFIG = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "prism_hadamard_qwen35")
"""Types of another family, and one whose weights have two bits always."""

FORMATS = {"affine": (32, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}

Weights = dict[str, mx.array]


def mixed(path: str, module: Any) -> bool | dict[str, Any]:
    """Return another format for some modules, as the quantization predicates of mlx-lm do."""
    if "lm_head" in path or "embed" in path:
        return {"group_size": 32, "bits": 6, "mode": "affine"}
    if "o_proj" in path:
        return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    return hasattr(module, "to_quantized") and "v_proj" not in path


def write(path: Path, model_type: str, mode: str = "") -> Path:
    """Write what mlx-lm writes for a tiny model, quantized by `mode`."""
    config = tiny_config(model_type)
    mx.random.seed(3)
    model: Any = make_model(config)
    model.update(
        tree_map(lambda w: w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w, model.parameters())
    )
    if mode:
        size, bits = FORMATS.get(mode, (32, 4))
        predicate = mixed if mode == "mixed" else None
        form = "affine" if mode == "mixed" else mode
        model, config = quantize_model(model, config, size, bits, mode=form, quant_predicate=predicate)
    path.mkdir()
    save_model(path, model, donate_model=False)
    save_config(config, path / "config.json")
    return path


def rewrite(path: Path, change: Any, **fields: Any) -> Path:
    """Replace the tensors of a checkpoint by `change` of them, and add `fields` to its config."""
    file = path / "model.safetensors"
    weights = change(dict(mx.load(str(file))))  # type: ignore[arg-type]
    mx.eval(weights)
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    mx.save_safetensors(str(file), weights, {"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(config))
    return path


def raw_experts(weights: Weights) -> Weights:
    """Return the experts one by one, as transformers stores them."""
    found = {}
    for name, weight in weights.items():
        if ".switch_mlp." not in name:
            found[name] = weight
            continue
        for number in range(weight.shape[0]):
            found[name.replace(".switch_mlp.", f".experts.{number}.")] = weight[number]
    return found


def raw_taps(weights: Weights) -> Weights:
    """Return convolutions as PyTorch stores them."""
    return {name: mx.moveaxis(w, 2, 1) if "conv1d.weight" in name else w for name, w in weights.items()}


def raw_blocks(weights: Weights) -> Weights:
    """Return experts in mxfp4 as OpenAI stores them: gate and up by turns, codes as bytes."""
    found = {name: w for name, w in weights.items() if ".experts." not in name}
    for name, w in weights.items():
        module, leaf = name.rsplit(".", 1)
        if ".experts." not in name or ".up_proj" in name:
            continue
        if ".gate_proj" in name:
            up = weights[name.replace(".gate_proj", ".up_proj")]
            both = mx.stack([w, up], axis=2)
            w, module = both.reshape(w.shape[0], -1, *w.shape[2:]), module.replace(".gate_proj", ".gate_up_proj")
        if leaf == "weight":
            w = w.view(mx.uint8).reshape(*w.shape[:2], -1, 16)
        found[f"{module}_{'blocks' if leaf == 'weight' else leaf}"] = w
    return found


def expected(path: Path) -> list[int]:
    """Return mlx-lm's own greedy tokens."""
    model, _ = load_model(path)
    return [int(token) for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=COUNT)]


def greedy(path: Path) -> list[int]:
    """Return the greedy tokens of stages that are read from `path`."""
    checkpoint = Checkpoint.open(path)
    count = checkpoint.config.num_layers
    stages = [
        load_stage(checkpoint, Span(start, end), first=start == 0, last=end == count, dtype=None)
        for start, end in ((0, count // 2), (count // 2, count))
    ]
    caches = [[layer.new_cache(KVFormat()) for layer in stage.layers] for stage in stages]
    tokens = list(PROMPT)
    rows = tokens
    for _ in range(COUNT):
        x = stages[0].embed_tokens(mx.array(rows, mx.uint32))
        for stage, own in zip(stages, caches, strict=True):
            stage.layers[0].enter(x, [own], [len(rows)])
            for layer, cache in zip(stage.layers, own, strict=True):
                x = layer.forward(x, [cache], [len(rows)], [False])
        rows = [int(mx.argmax(stages[-1].lm_head(x[-1:]).reshape(-1)))]
        tokens += rows
    return tokens[len(PROMPT) :]


SERVED = [name for name in MODEL_TYPES if name not in OWN_CONFIG and not known_results()[name].refused]


@pytest.mark.parametrize("mode", ["", "affine"], ids=["plain", "4 bits"])
@pytest.mark.parametrize("model_type", [t if t in USUAL else pytest.param(t, marks=pytest.mark.slow) for t in SERVED])
def test_files_of_mlx_lm(tmp_path: Path, model_type: str, mode: str) -> None:
    """Stages read what mlx-lm writes, and each stage has the same plan from its own tensors alone."""
    path = write(tmp_path / "m", model_type, mode)
    assert greedy(path) == expected(path)
    whole = Checkpoint.open(path)
    count = whole.config.num_layers
    for start, end in ((0, 1), (1, count - 1), (count - 1, count)):
        parts = whole.stage_parts(Span(start, end), first=start == 0, last=end == count)
        own = {name: whole.tensors[name] for part in parts for name in whole.tensors_of(part)}
        stage = Checkpoint.assemble(whole.path, whole.config, whole.layout, own)
        assert all(stage.plans[part] == whole.plans[part] for part in parts)
        stage.check_readable()


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8", "mixed"])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe"])
def test_formats_of_mlx_lm(tmp_path: Path, model_type: str, mode: str) -> None:
    """Each module has the format that its shapes tell, whatever the default in config.json."""
    path = write(tmp_path / "m", model_type, mode)
    assert greedy(path) == expected(path)


@pytest.mark.parametrize(
    ("model_type", "mode", "change", "fields"),
    [
        ("qwen3_moe", "", raw_experts, {}),
        ("falcon_h1", "", raw_taps, {}),
        ("gpt_oss", "mxfp4", raw_blocks, {"quantization": None, "quantization_config": {"quant_method": "mxfp4"}}),
    ],
)
def test_a_publishers_checkpoint(tmp_path: Path, model_type: str, mode: str, change: Any, fields: Any) -> None:
    """It is read as mlx-lm reads it, and its conversions too. A stage with a part of its tensors is refused."""
    path = write(tmp_path / "m", model_type, mode)
    if mode:  # OpenAI quantizes the experts alone
        model, _ = load_model(path)
        plain = dict(tree_flatten(make_model(tiny_config(model_type)).parameters()))
        packed: Weights = dict(tree_flatten(model.parameters()))
        kept = {n: w for n, w in packed.items() if ".experts." in n}
        others = {n: w.astype(mx.float32) for n, w in plain.items() if ".experts." not in n}
        rewrite(path, lambda _: kept | others)
    rewrite(path, change, **fields)
    if "quantization" in fields:
        config = json.loads((path / "config.json").read_text())
        del config["quantization"]
        (path / "config.json").write_text(json.dumps(config))
    assert greedy(path) == expected(path)
    for settings in (Settings(), Settings(Quantization.of(8, 32))):
        copy = tmp_path / f"copy {settings.quantization is None}"
        convert(open_source(path), copy, settings)
        assert greedy(copy) == expected(copy)
        assert not Checkpoint.open(copy).is_raw
        assert not WeightProvider(Checkpoint.open(copy), pb.ModelRef(), share=True).problem
        if settings.quantization is None:
            assert expected(copy) == expected(path)
    whole = Checkpoint.open(path)
    assert whole.is_raw
    assert "convert the model once" in WeightProvider(whole, pb.ModelRef(), share=True).problem
    own = {name: info for name, info in whole.tensors.items() if ".layers.1." in name}
    with pytest.raises(CheckpointError, match="Convert the model once"):
        Checkpoint.assemble(path, whole.config, whole.layout, own).check_readable()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**9}, "not a number from 1 to 1024"),
        ({"num_hidden_layers": "4"}, "not a number from 1 to 1024"),
        ({"num_attention_heads": "four"}, "mlx-lm cannot make"),
        ({"model_type": "zamba9", "auto_map": {"AutoModel": "x.X"}}, "code of a checkpoint is not run"),
        ({"model_file": "own.py"}, "code of its own, which is not run"),
        ({"model_type": "nanbeige"}, "more than once"),
    ],
)
def test_a_config_that_cannot_be_served(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """The error says why, before a tensor is read, and nothing of the checkpoint runs."""
    path = rewrite(write(tmp_path / "m", "llama"), lambda weights: weights, **fields)
    (path / "own.py").write_text("raise SystemExit")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(path)


def add_type(path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str = "") -> None:
    """Add a model type to mlx-lm, as a newer version does."""
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(path)])
    (path / f"{name}.py").write_text(f"from mlx_lm.models.llama import Model, ModelArgs\n{code}")


def test_a_type_of_a_newer_mlx_lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A type without a test is tried with a small model, and served if it has mlx-lm's logits."""
    add_type(tmp_path, monkeypatch, "newer1")
    path = rewrite(write(tmp_path / "m", "llama"), lambda weights: weights, model_type="newer1")
    assert greedy(path) == expected(path)


def test_a_newer_class_that_cannot_be_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a type whose small model differs over machines says so, before a tensor is read."""
    code = (
        "class Model(Model):\n"
        "    def __call__(self, tokens, cache=None):\n"
        "        return super().__call__(tokens, cache) + tokens[..., None]\n"
    )
    add_type(tmp_path, monkeypatch, "newer2", code)
    path = rewrite(write(tmp_path / "m", "llama"), lambda _: {"x": mx.zeros(1)}, model_type="newer2")
    with pytest.raises(CheckpointError, match="newer2 is not supported: its logits over machines differ"):
        Checkpoint.open(path)


@pytest.mark.parametrize("model_type", ["plamo3", "longcat_flash_ngram", "kimi_k3", "gemma4"])
def test_a_trial_finds_what_the_tests_find(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types that the table refuses are also refused without their result."""
    monkeypatch.delitem(known_results(), model_type)
    problem = MlxLmFamily().find_problem(tiny_config(model_type))
    assert problem is not None and "is not supported: its " in problem


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(model.config, marks=() if model.short == "gpt-oss:120b" else pytest.mark.slow, id=model.short)
        for model in MLX_LM_MODELS
    ],
)
def test_published_models_are_tried_small(config: dict[str, Any]) -> None:
    """A published config becomes a small one with each kind of its layers, which gives mlx-lm's logits."""
    assert trial_problem(json.dumps(config)) == ""


def test_auto_map_of_a_known_type_is_ignored(tmp_path: Path) -> None:
    """Code beside a type that mlx-lm has is not run, and not needed."""
    path = rewrite(write(tmp_path / "m", "llama"), lambda weights: weights, auto_map={"AutoModel": "x.X"})
    assert greedy(path) == expected(path)


def test_weights_without_a_layer(tmp_path: Path) -> None:
    """The error names the missing tensors."""
    path = rewrite(
        write(tmp_path / "m", "llama"), lambda weights: {n: w for n, w in weights.items() if ".layers.2." not in n}
    )
    with pytest.raises(CheckpointError, match=r"layers\.2\..* missing"):
        greedy(path)


def test_a_model_of_many_tensors_is_planned() -> None:
    """Each of more than a thousand tensors is read as it is stored."""
    config = tiny_config("llama") | {"num_hidden_layers": 130}
    plan = structure_of(config)
    found = plan_tensors(config, plan, {name: ("F32", shape) for name, shape in plan.shapes})
    assert sum(map(len, found.parts.values())) == len(plan.shapes) > 1024
    assert not found.is_raw
