"""The product of few rows on the Metal path: its errors, its independent rows, what it reads, and its choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchLinear

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers import few_rows
from mtp.layers.few_rows import can_multiply, multiply_few
from mtp.layers.fused import row_trials
from mtp.layers.fused.row_trials import FewRowsExperts, FewRowsLinear, RowTrials, longest_run
from mtp.layers.layer import KernelTrial, KVFormat
from mtp.layers.linear import FewRowsFormat, Format, FusedLinear
from proto.kernels import Kernels
from proto.span import Span
from tests.conftest import Checkpoints
from tests.parity.test_metal_layers import outputs
from tests.support.metal import runner
from tests.support.metal.metal_path import metal_path
from tests.support.metal.runner import count_launches
from worker.model import layer_variants
from worker.model.layer_variants import KernelChoice
from worker.model.loader import load_stage
from worker.model.stage import StageForward

AFFINE = [(bits, group) for bits in (3, 4, 6, 8) for group in (32, 64, 128) if (bits, group) != (3, 32)]

FORMATS = [
    *(Format(bits, group, "affine") for bits, group in AFFINE),
    Format(4, 32, "mxfp4"),
    Format(4, 16, "nvfp4"),
    Format(8, 32, "mxfp8"),
]

USUAL = [kind for kind in FORMATS if kind.group_size in (16, 64) or kind.mode != "affine"]
"""The formats that are not left to the slow tests."""

OUTPUTS, INPUTS = 84, 256


@pytest.fixture(autouse=True)
def _on_metal() -> Iterator[None]:
    with metal_path() as patch:
        patch.setattr(row_trials, "TRIED_ROWS", (8,))
        patch.setattr(row_trials, "TRIED_PAIRS", (64,))
        yield


def weights_of(kind: Format, dtype: mx.Dtype, *shape: int) -> tuple[mx.array, ...]:
    """Return random weights of the format."""
    weight = mx.random.normal(shape or (OUTPUTS, INPUTS), scale=0.05, key=mx.random.key(3)).astype(dtype)
    return tuple(mx.quantize(weight, kind.group_size, kind.bits, mode=kind.mode))


def exact_product(kind: Format, x: mx.array, weights: tuple[mx.array, ...]) -> np.ndarray:
    """Return the product in float64, with the codes and scales as they are stored."""
    code, scales, *biases = weights
    settings: Any = {"group_size": kind.group_size, "bits": kind.bits, "mode": kind.mode}
    if biases:
        ones = mx.ones(scales.shape)
        codes = np.array(mx.dequantize(code, ones, mx.zeros_like(ones), **settings), np.float64)
        scale, bias = (
            np.repeat(np.array(w.astype(mx.float32), np.float64), kind.group_size, axis=1) for w in (scales, *biases)
        )
        values = codes * scale + bias
    else:
        values = np.array(mx.dequantize(code, scales, **settings).astype(mx.float32), np.float64)
    return np.array(x.astype(mx.float32), np.float64) @ values.T


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(pytest.param(kind, mx.bfloat16, marks=() if kind in USUAL else pytest.mark.slow) for kind in FORMATS),
        (Format(4, 64, "affine"), mx.float16),
        *((kind, mx.float32) for kind in (Format(4, 64, "affine"), Format(8, 64, "affine"), Format(4, 32, "mxfp4"))),
    ],
    ids=str,
)
def test_errors_are_not_above_those_of_mlx(kind: Format, dtype: mx.Dtype) -> None:
    """In half types the error is at most that of MLX. In fp32 scale and bias of a group apart cost some bits."""
    weights = weights_of(kind, dtype)
    x = mx.random.normal((11, INPUTS), key=mx.random.key(4)).astype(dtype)
    assert can_multiply(kind, weights, dtype)
    expected = exact_product(kind, x, weights)
    own, theirs = (
        np.abs(np.array(y.astype(mx.float32), np.float64) - expected).max() / np.abs(expected).max()
        for y in (multiply_few(kind, x, weights), kind.multiply(x, weights))
    )
    assert own <= (2e-6 if dtype == mx.float32 else 1.01 * theirs)


@pytest.mark.parametrize("outputs", [8, 84, 1030, 4100])
@pytest.mark.parametrize("kind", [Format(4, 64, "affine"), Format(8, 32, "affine")], ids=str)
def test_the_bits_of_a_row_depend_on_no_other(kind: Format, outputs: int) -> None:
    """Rows alone and in company, in every tile, and outputs that no tile divides."""
    weights = weights_of(kind, mx.bfloat16, outputs, 128)
    x = mx.random.normal((33, 128), key=mx.random.key(4)).astype(mx.bfloat16)
    whole = multiply_few(kind, x, weights)
    counts = (1, 2, 5, 7, 8, 9, 12, 15, 16, 17) if outputs < 1000 else (1, 8, 9)
    for count in counts:
        assert mx.array_equal(multiply_few(kind, x[:count], weights), whole[:count]).item(), count
    assert mx.array_equal(multiply_few(kind, x[30:], weights), whole[30:]).item()


@pytest.mark.parametrize(("rows", "reads"), [(1, 1), (8, 1), (9, 1), (16, 1), (17, 2)])
def test_weights_are_read_once(rows: int, reads: int) -> None:
    """16 rows read the weights once, within 16 KB of threadgroup memory."""
    kind = Format(4, 64, "affine")
    weights = weights_of(kind, mx.bfloat16, 4096, 128)
    with count_launches() as launches:
        mx.eval(multiply_few(kind, mx.ones((rows, 128), mx.bfloat16), weights))
    assert len(launches) == 1
    assert launches[0].reads["w"] == reads * weights[0].nbytes
    assert launches[0].shared_bytes <= 16 * 1024


def test_rows_of_experts() -> None:
    """Sorted rows of one expert share a tile, and each has the bits that it has alone."""
    kind = Format(4, 64, "affine")
    weights = weights_of(kind, mx.bfloat16, 5, OUTPUTS, INPUTS)
    experts = mx.array([0] * 3 + [1] * 17 + [3] + [4] * 8, mx.uint32)
    x = mx.random.normal((experts.size, INPUTS), key=mx.random.key(4)).astype(mx.bfloat16)
    with count_launches() as launches:
        found = multiply_few(kind, x, weights, experts)
    owners: Any = experts.tolist()
    for row, expert in enumerate(owners):
        alone = multiply_few(kind, x[row : row + 1], tuple(w[expert] for w in weights))
        assert mx.array_equal(found[row], alone[0]).item()
    one_expert = weights[0].nbytes // 5
    assert launches[0].reads["w"] == one_expert * (1 + 3 + 1 + 1) * -(-OUTPUTS // 8) * 8 // OUTPUTS
    product = FusedLinear(FewRowsFormat(4, 64, "affine", (1, 64)), weights)
    assert mx.array_equal(product.gather(x[:, None], experts, is_sorted=True)[:, 0], found).item()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Format(5, 64, "affine"), None),
        (Format(3, 32, "affine"), None),
        (Format(4, 64, "affine"), mx.int32),
        (Format(), None),
    ],
    ids=["5 bits", "3 bits in groups of 32", "another type", "dense"],
)
def test_other_weights_stay_with_mlx(kind: Format, change: mx.Dtype | None, tmp_path: Path) -> None:
    """They have no trial."""
    dense = mx.zeros((64, 128))
    weights = (dense,) if kind.bits is None else weights_of(kind, mx.float32)
    weights = weights if change is None else (weights[0].view(change), *weights[1:])
    trials = RowTrials(KernelChoice(Kernels.own, tmp_path / "kernels.json").choose, mx.float32)
    assert trials.choose_few(kind, weights) is kind
    assert not (tmp_path / "kernels.json").exists()


# ---- the choice


def test_the_longest_run_of_wins() -> None:
    """Rows between two wins that follow each other are won, and no others."""
    assert longest_run((2, 4, 5, 8, 12), ()) == (0, 0)
    assert longest_run((2, 4, 5, 8, 12), (5, 8)) == (5, 8)
    assert longest_run((2, 4, 5, 8, 12), (2, 5, 8, 12)) == (5, 12)


WRONG = few_rows.SOURCE.replace("T(sum)", "T(sum + 1)")
BROKEN = few_rows.SOURCE.replace("constexpr uint STEP", "constexpr uint")


@pytest.mark.parametrize(
    ("source", "trial", "is_used"),
    [
        (few_rows.SOURCE, KernelTrial(1.0, 2.0), True),
        (few_rows.SOURCE, KernelTrial(2.0, 1.0), False),
        (WRONG, None, False),
        (BROKEN, None, False),
    ],
    ids=["fast", "slow", "wrong", "does not compile"],
)
def test_a_trial_decides(
    source: str,
    trial: KernelTrial | None,
    is_used: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The state directory keeps its result. MLX multiplies where the kernel is slower or wrong, and a line says so."""
    few_rows._kernel.cache_clear()
    monkeypatch.setattr(few_rows, "SOURCE", source)
    if trial is not None:
        monkeypatch.setattr(row_trials, "try_product", lambda *_: trial)
    file = tmp_path / "kernels.json"
    choice = KernelChoice(Kernels.auto if trial else Kernels.own, file)
    trials = RowTrials(partial(choice.choose, quiet=True), mx.float32)
    kind = Format(4, 64, "affine")
    with caplog.at_level("INFO"):
        found = trials.choose_few(kind, weights_of(kind, mx.float32))
    few_rows._kernel.cache_clear()
    assert isinstance(found, FewRowsFormat)
    assert found.few == ((8, 8) if is_used else (0, 0))
    kept = json.loads(file.read_text())
    assert len(kept) == 1
    assert bool(next(iter(kept.values()))["problem"]) == (trial is None)
    assert any("few rows" in record.message or "kernel chosen" in record.message for record in caplog.records)
    again = RowTrials(partial(KernelChoice(choice.mode, file).choose, quiet=True), mx.float32)
    monkeypatch.setattr(row_trials, "try_product", lambda *_: pytest.fail("tried twice"))
    assert again.choose_few(kind, weights_of(kind, mx.float32)) == found


def test_a_load_ends_its_trials_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without time MLX multiplies, and the next load tries."""
    monkeypatch.setattr(row_trials, "LOAD_SECONDS", 0.0)
    file, kind = tmp_path / "kernels.json", Format(4, 64, "affine")
    trials = RowTrials(KernelChoice(Kernels.own, file).choose, mx.float32)
    found: Any = trials.choose_few(kind, weights_of(kind, mx.float32))
    assert found.few == (0, 0)
    assert not file.exists()


def test_a_linear_layer_of_mlx_lm_takes_it(tmp_path: Path) -> None:
    """Its rows in the range have the kernel's bits, others MLX's, and a bias is added."""
    dense = nn.Linear(INPUTS, OUTPUTS, bias=True)
    layer = nn.QuantizedLinear.from_linear(dense, 64, 4)
    plain = nn.QuantizedLinear.from_linear(dense, 64, 4)
    trials = RowTrials(KernelChoice(Kernels.own, tmp_path / "kernels.json").choose, mx.float32)
    trials.replace(layer)
    assert type(layer) is FewRowsLinear
    x = mx.random.normal((2, 4, INPUTS))
    weights: Any = layer.weight, layer.scales, layer.biases
    own = multiply_few(Format(4, 64, "affine"), x.reshape(8, INPUTS), weights)
    assert mx.array_equal(layer(x).reshape(8, -1), own + layer.bias).item()
    assert mx.array_equal(layer(x[:1]), plain(x[:1])).item()


@pytest.mark.parametrize("bias", [True, False])
def test_experts_of_mlx_lm_take_it(bias: bool, tmp_path: Path) -> None:
    """Sorted pairs have the kernel's products, and others MLX's."""
    dense = SwitchLinear(INPUTS, 64, 5, bias=bias)
    layer, plain = dense.to_quantized(64, 4), dense.to_quantized(64, 4)
    trials = RowTrials(KernelChoice(Kernels.own, tmp_path / "kernels.json").choose, mx.float32)
    trials.replace(layer)
    assert type(layer) is FewRowsExperts
    experts = mx.sort(mx.random.randint(0, 5, (64,)).astype(mx.uint32))
    x = mx.random.normal((64, 1, INPUTS))
    before = runner.runs["few_rows"]
    assert mx.allclose(layer(x, experts, sorted_indices=True), plain(x, experts, sorted_indices=True), atol=1e-4).item()
    assert runner.runs["few_rows"] == before + 1
    assert mx.array_equal(layer(x[:8], experts[:8]), plain(x[:8], experts[:8])).item()
    assert runner.runs["few_rows"] == before + 1


def test_a_stage_of_4_bits_takes_it(checkpoints: Checkpoints) -> None:
    """All products of a stage multiply eight rows so, with the results of MLX's. One row stays with MLX."""
    stages = []
    for kernels in (Kernels.own, Kernels.mlx):
        checkpoint = Checkpoint.open(checkpoints(layout="mlx", quantize=4, hidden=128, layers=4))
        modules = load_stage(checkpoint, Span(0, 4), first=True, last=True, dtype=None, with_head=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_variants, "KernelChoice", lambda _, file, mode=kernels: KernelChoice(mode, file))
            stages.append(StageForward(modules, KVFormat(), kernels=kernels))
    assert "few_rows" in stages[0].variants.arithmetic
    before = runner.runs["few_rows"]
    found, expected = (outputs(stage, (4,), 0) for stage in stages)
    assert runner.runs["few_rows"] - before > 8
    assert mx.allclose(found, expected, atol=1e-3).item()
