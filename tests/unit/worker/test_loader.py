"""Loading a stage gives exactly mlx-lm's weights, for exactly the requested span."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.layer import Layer
from mtp.layers.reference import ReferenceLayer
from proto.errors import UsageError
from proto.span import Span
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import (
    assert_same_tensors,
    read_tensors,
    write_checkpoint,
)
from worker.model.loader import StageModules, load_stage

WHOLE = Span(0, 8)
Weights = dict[str, mx.array]


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
def test_a_loaded_stage_holds_what_mlx_lm_holds(
    checkpoints: Checkpoints, options: dict[str, Any]
) -> None:
    """Every parameter has mlx-lm's name, dtype and bits, and every module mlx-lm's class and quantization."""
    path = checkpoints(**options)
    stage = _whole(path)
    theirs, _ = load_model(path)
    assert_same_tensors(_backbone(stage), dict(tree_flatten(theirs.parameters())))
    for ours, reference in zip(stage.layers, theirs.layers, strict=True):
        modules = dict(module_of(ours).named_modules())
        for name, module in reference.named_modules():
            assert type(modules[name]) is type(module)
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


def test_only_files_of_the_span_are_opened(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files without a tensor of the span are never opened, so they need not exist."""
    checkpoint = Checkpoint.open(checkpoints(shards=6))
    opened: set[Path] = set()
    load = mx.load

    def record(file: str) -> Any:
        opened.add(Path(file))
        return load(file)

    monkeypatch.setattr("mtp.checkpoint.format.parts.mx.load", record)
    load_stage(checkpoint, Span(2, 4), first=False, last=False, dtype=None)
    holding = {
        info.file
        for name, info in checkpoint.tensors.items()
        if ".layers.2." in name or ".layers.3." in name
    }
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
        assert (
            peak <= span + 2 * largest
        )  # fused experts are twice the size of what they are split into
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
