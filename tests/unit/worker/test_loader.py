"""Loading a stage gives exactly mlx-lm's weights, for exactly the requested span."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3_5 import SparseMoeBlock
from mlx_lm.utils import load_model

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.experts import OrderedExperts
from mtp.layers.layer import Layer
from mtp.layers.reference import ReferenceLayer
from proto.errors import CheckpointError, UsageError
from proto.span import Span
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import (
    Weights,
    assert_same_tensors,
    edit_tensors,
    read_tensors,
    write_checkpoint,
)
from worker.model.loader import StageModules, load_stage

WHOLE = Span(0, 8)


def _whole(path: Path, dtype: mx.Dtype | None = None) -> StageModules:
    return load_stage(Checkpoint.open(path), WHOLE, first=True, last=True, dtype=dtype)


def module_of(layer: Layer) -> nn.Module:
    """Return the module of mlx-lm in a reference layer."""
    assert isinstance(layer, ReferenceLayer)
    return layer.module


def _weights(module: nn.Module | None, prefix: str) -> Weights:
    flat = dict(tree_flatten(module.parameters())) if module else {}
    return {prefix + name: weight for name, weight in flat.items()}


def _backbone(stage: StageModules) -> Weights:
    """Return the parameters under the names of mlx-lm's own model."""
    weights = _weights(stage.lm_head, "language_model.lm_head.")
    model = "language_model.model."
    weights |= _weights(stage.embed_tokens, f"{model}embed_tokens.")
    weights |= _weights(stage.norm, f"{model}norm.")
    for number, layer in zip(stage.span, stage.layers, strict=True):
        weights |= _weights(module_of(layer), f"{model}layers.{number}.")
    return weights


# ---- the same as mlx-lm


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie": False, "shards": 3},
        {"dtype": mx.bfloat16},
        {"moe": True},
        {"layout": "mlx"},
        {"layout": "mlx", "quantize": 4},
        {"layout": "mlx", "quantize": 8, "tie": False},
        {"layout": "mlx", "quantize": 4, "overrides": True, "shards": 3},
        {"layout": "mlx", "quantize": 4, "moe": True},
        {"layout": "mlx", "quantize": 8, "moe": True, "overrides": True, "tie": False},
        {"layout": "mlx", "quantize": 4, "dtype": mx.bfloat16, "mtp": False},
    ],
    ids=repr,
)
def test_a_loaded_stage_holds_what_mlx_lm_holds(checkpoints: Checkpoints, options: dict[str, Any]) -> None:
    """Every parameter has mlx-lm's name, dtype and bits, and every module mlx-lm's class and quantization.

    Only experts are of an own class, which orders equal logits.
    """
    path = checkpoints(**options)
    stage = _whole(path)
    theirs, _ = load_model(path)
    assert_same_tensors(_backbone(stage), dict(tree_flatten(theirs.parameters())))
    for ours, reference in zip(stage.layers, theirs.layers, strict=True):
        modules = dict(module_of(ours).named_modules())
        for name, module in reference.named_modules():
            wanted = OrderedExperts if type(module) is SparseMoeBlock else type(module)
            assert type(modules[name]) is wanted
            for setting in ("bits", "group_size", "mode"):
                assert getattr(modules[name], setting, None) == getattr(module, setting, None)


def test_every_span_holds_its_part_of_the_whole(checkpoints: Checkpoints) -> None:
    """A stage equals its slice of the whole model, also with only GDN or only attention layers."""
    qwen3_next = {"moe": True, "qwen3_next": True}
    for options in ({}, {"moe": True, "shards": 3}, {"layout": "mlx", "quantize": 4}, qwen3_next):
        checkpoint = Checkpoint.open(checkpoints(**options))
        whole = _backbone(_whole(checkpoint.path))
        for span in (Span(0, 3), Span(3, 4), Span(4, 8), Span(7, 8)):
            stage = load_stage(checkpoint, span, first=False, last=False, dtype=None)
            assert (stage.embed_tokens, stage.norm, stage.lm_head, stage.head) == (None,) * 4
            weights = _backbone(stage)
            assert len(weights) > 0
            assert_same_tensors(weights, {name: whole[name] for name in weights})


# ---- the head


@pytest.mark.parametrize("moe", [False, True])
def test_raw_and_converted_heads_are_equal(checkpoints: Checkpoints, moe: bool) -> None:
    """A raw head's norms become stored + 1, and a converted head's norms stay unchanged."""
    raw, converted = checkpoints(moe=moe), checkpoints(moe=moe, layout="mlx")
    head = _weights(_whole(raw).head, "mtp.")
    assert_same_tensors(head, _weights(_whole(converted).head, "mtp."))
    stored = read_tensors(raw)
    vectors = [name for name, weight in head.items() if weight.ndim == 1]
    assert len(vectors) == 7
    for name in vectors:
        assert mx.array_equal(head[name], stored[name] + 1)
    assert mx.array_equal(head["mtp.fc.weight"], stored["mtp.fc.weight"])


def test_without_its_tensors_the_head_is_none(checkpoints: Checkpoints) -> None:
    """A stage without the head's tensors loads, and drops an embedding that only the head would use."""
    checkpoint = Checkpoint.open(checkpoints(mtp=False, tie=False))
    stage = load_stage(checkpoint, Span(4, 8), first=False, last=True, dtype=None)
    assert (stage.head, stage.embed_tokens) == (None, None)
    assert stage.lm_head is not None


# ---- dtypes


def test_dtype_applies_to_all_but_a_log(checkpoints: Checkpoints) -> None:
    """Weights, norms, scales and biases get the requested dtype. A_log stays fp32, and packed weights stay packed."""
    stage = _whole(checkpoints(layout="mlx", quantize=4), mx.float16)
    weights = _backbone(stage) | _weights(stage.head, "mtp.")
    for name, weight in weights.items():
        if name.endswith("A_log"):
            assert weight.dtype == mx.float32
        elif weight.dtype != mx.uint32:
            assert weight.dtype == mx.float16, name
    assert any(name.endswith("scales") for name in weights)


def test_norms_are_shifted_before_they_are_rounded(checkpoints: Checkpoints) -> None:
    """A raw bf16 norm loaded as fp32 is exactly 1 + w, with one rounding fewer than a shift in bf16."""
    path = checkpoints(dtype=mx.bfloat16)
    stage = _whole(path, mx.float32)
    assert stage.norm is not None
    stored = read_tensors(path)["model.language_model.norm.weight"]
    assert mx.array_equal(stage.norm.weight, stored.astype(mx.float32) + 1)
    assert not mx.array_equal(stage.norm.weight, (stored + 1).astype(mx.float32))


def test_unquantized_experts_in_bf16_are_refused_on_the_cpu(checkpoints: Checkpoints) -> None:
    """Unquantized bf16 experts on the CPU are refused before any read, and the error names the flag.

    MLX itself would fail at the first token.
    """
    with mx.stream(mx.cpu):
        for options, dtype in (
            ({"moe": True, "dtype": mx.bfloat16}, None),
            ({"moe": True}, mx.float16),
        ):
            with pytest.raises(UsageError, match="--dtype float32"):
                _whole(checkpoints(**options), dtype)
        _whole(checkpoints(moe=True, dtype=mx.bfloat16), mx.float32)
        _whole(checkpoints(moe=True, layout="mlx", quantize=4), mx.bfloat16)


# ---- only its span


def test_only_files_of_the_span_are_opened(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files without a tensor of the span are never opened, so they need not exist."""
    checkpoint = Checkpoint.open(checkpoints(shards=6))
    opened: set[Path] = set()
    load = mx.load

    def record(file: str) -> Any:
        opened.add(Path(file))
        return load(file)

    monkeypatch.setattr("mtp.checkpoint.format.parts.mx.load", record)
    load_stage(checkpoint, Span(2, 4), first=False, last=False, dtype=None)
    holding = {info.file for name, info in checkpoint.tensors.items() if ".layers.2." in name or ".layers.3." in name}
    assert opened == holding
    assert len(opened) < 6


_MEASURE = """
import json, sys, mlx.core as mx
from pathlib import Path
from mlx.utils import tree_flatten
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.span import Span
from worker.model.loader import load_stage

def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])

for path, dtype in json.loads(sys.argv[1]):
    mx.reset_peak_memory()
    before = bytes_read()
    checkpoint = Checkpoint.open(Path(path))
    span = Span(2, 4)
    dtype = getattr(mx, dtype) if dtype else None
    stage = load_stage(checkpoint, span, first=False, last=False, dtype=dtype)
    sizes = checkpoint.part_bytes()
    held = sum(sizes[f"layers.{i}"] for i in span)
    largest = max(w.nbytes for layer in stage.layers for _, w in tree_flatten(layer.module.parameters()))
    kept = mx.get_active_memory() + mx.get_cache_memory()
    print(bytes_read() - before, mx.get_peak_memory(), kept, held, sum(sizes.values()), largest)
    del stage
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="counts bytes in /proc/self/io")
def test_a_quarter_stage_reads_and_holds_a_quarter(tmp_path: Path) -> None:
    """Loading 2 of 8 layers reads the bytes of the span and the headers, and peaks at the span and one tensor.

    The cases are raw, cast, experts stacked while loading, and quantized. A small checkpoint of each kind loads first,
    so that the first load's Python imports are not counted.
    """
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({}, None),
        ({}, "bfloat16"),
        ({"moe": True, "fused_experts": False}, None),
        ({"moe": True}, None),
        ({"layout": "mlx", "quantize": 4}, None),
        ({"moe": True, "qwen3_next": True}, None),
    ]
    common: dict[str, Any] = {"shards": 2, "mtp": False}
    jobs = [
        (str(write_checkpoint(tmp_path / f"{hidden}-{i}", hidden=hidden, **common, **kind)), dtype)
        for hidden in (64, 256)
        for i, (kind, dtype) in enumerate(cases)
    ]
    command = [sys.executable, "-c", _MEASURE, json.dumps(jobs)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    lines = output.splitlines()[len(cases) :]
    assert len(lines) == len(cases)
    for line in lines:
        read, peak, kept, span, total, largest = map(int, line.split())
        assert span < 0.26 * total
        assert read <= span + 100_000
        assert peak <= span + 2 * largest  # fused experts are twice the size of what they are split into
        assert kept <= span + 20_000


def test_loads_leave_nothing_behind_in_the_generator(checkpoints: Checkpoints) -> None:
    """Loads leave no random keys in MLX's generator.

    Modules are created with random weights that are never computed. A worker with many plans grew by their keys.
    """
    _whole(checkpoints())
    state: Any = mx.random.state
    graph = io.StringIO()
    mx.export_to_dot(graph, state[0])
    assert graph.getvalue().count("->") == 0, "the key depends on splits that were never computed"


def _damaged(path: Path, change: Callable[[Weights], object], **options: Any) -> Callable[[], StageModules]:
    write_checkpoint(path, **options)
    edit_tensors(path, change, "pt" if options.get("layout", "raw") == "raw" else "mlx")
    layers = Span(0, options.get("layers", 8))
    return lambda: load_stage(Checkpoint.open(path), layers, first=True, last=True, dtype=None)


_LAYER = "model.language_model.layers.1."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop(f"{_LAYER}mlp.up_proj.weight"),
            r"tensor layers\.1\.mlp\.up_proj\.weight is missing",
        ),
        (
            lambda w: w.update({f"{_LAYER}mlp.extra.weight": mx.zeros(3)}),
            r"model\.safetensors: tensor model\.language_model\.layers\.1\.mlp\.extra\.weight is not part",
        ),
        (
            lambda w: w.update({f"{_LAYER}mlp.up_proj.weight": mx.zeros((3, 64))}),
            r"model\.safetensors: .*layers\.1\.mlp\.up_proj\.weight.* \(3, 64\).*\(128, 64\)",
        ),
        (
            lambda w: w.update({f"{_LAYER}mlp.up_proj.scales": mx.zeros((128, 1))}),
            r"layers\.1\.mlp\.up_proj\.scales .*quantized",
        ),
        (
            lambda w: w.update({"model.language_model.layers.9.norm.weight": mx.zeros(3)}),
            r"layers\.9\.norm\.weight belongs to no part",
        ),
        (
            lambda w: w.update({"mtp.fc.weight": mx.zeros((64, 64))}),
            r"mtp\.fc\.weight.*\(64, 64\).*\(64, 128\)",
        ),
        (
            lambda w: w.pop("model.language_model.embed_tokens.weight"),
            r"tensor embed_tokens\.weight is missing. Download",
        ),
    ],
    ids=["missing", "extra", "shape", "scales", "layer", "head shape", "embedding"],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, change: Callable[[Weights], object], message: str) -> None:
    """A missing, extra or misshapen tensor is named, with its file if it has one."""
    load = _damaged(tmp_path, change, layers=4)
    with pytest.raises(CheckpointError, match=message):
        load()


_INTEGERS = {"I8": mx.int8, "I64": mx.int64, "U32": mx.uint32, "F8_E4M3": mx.uint8, "F64": mx.int64}
"""Types that floats are not stored in, each with an integer type of equal size."""


@pytest.mark.parametrize("stored", _INTEGERS)
def test_a_float_of_an_impossible_type_is_named(tmp_path: Path, stored: str) -> None:
    """A float tensor stored in an impossible type is refused with file, tensor, type and advice.

    Without the check it would load and the model would print nonsense.
    """
    name = f"{_LAYER}mlp.up_proj.weight"
    wrong = mx.zeros((128, 64), _INTEGERS[stored])
    load = _damaged(tmp_path, lambda w: w.update({name: wrong}), layers=4)
    _relabel(tmp_path / "model.safetensors", name, stored)
    words = rf"model\.safetensors: tensor {re.escape(name)} is stored as {stored}; .*BF16 is needed. Use the"
    with pytest.raises(CheckpointError, match=words):
        load()


def _relabel(file: Path, tensor: str, dtype: str) -> None:
    """Replace a tensor's type in the file header by another type of equal size."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[tensor]["dtype"] = dtype
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_a_packed_weight_is_in_words(tmp_path: Path) -> None:
    """A packed weight that is not stored as U32 is refused. Its bits would be misread."""
    name = "language_model.model.layers.1.mlp.up_proj.weight"
    load = _damaged(
        tmp_path,
        lambda w: w.update({name: w[name].astype(mx.float32)}),
        layers=4,
        layout="mlx",
        quantize=4,
    )
    with pytest.raises(CheckpointError, match=rf"tensor {re.escape(name)} is stored as F32; U32 is needed"):
        load()


def test_a_tensor_type_mlx_cannot_read_is_named(tmp_path: Path) -> None:
    """A type that MLX cannot read is named with its tensor and advice, since MLX then reads no tensor of the file."""
    name = "model.visual.patch_embed.proj.weight"
    wrong = mx.zeros((8, 3), mx.int64)
    load = _damaged(tmp_path, lambda w: w.update({name: wrong}), layers=4)
    _relabel(tmp_path / "model.safetensors", name, "F64")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: MLX cannot read model\.visual\.\S+: .*F64"):
        load()


def test_tensors_missing_from_an_index(tmp_path: Path) -> None:
    """Tensors missing from an index are named and counted."""
    write_checkpoint(tmp_path, layers=4, shards=3, moe=True)
    index = tmp_path / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    for name in [n for n in found["weight_map"] if n.startswith(f"{_LAYER}mlp.")]:
        file = tmp_path / found["weight_map"].pop(name)
        kept = mx.load(str(file))
        assert isinstance(kept, dict)
        mx.eval(kept)
        del kept[name]
        mx.save_safetensors(str(file), kept, {"format": "pt"})
    index.write_text(json.dumps(found))
    words = r": tensors layers\.1\.mlp\.\S+, .* and \d more are missing. Download the checkpoint"
    with pytest.raises(CheckpointError, match=words):
        load_stage(Checkpoint.open(tmp_path), Span(0, 4), first=True, last=True, dtype=None)


def test_errors_outside_the_span_are_ignored(tmp_path: Path) -> None:
    """Errors in layers outside the span are ignored, so that a partial copy can serve the span."""
    _damaged(tmp_path, lambda w: w.pop(f"{_LAYER}mlp.up_proj.weight"), layers=4)
    checkpoint = Checkpoint.open(tmp_path)
    assert load_stage(checkpoint, Span(2, 4), first=False, last=False, dtype=None).layers
