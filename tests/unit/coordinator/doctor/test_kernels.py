"""Kernels in the doctor's report: exactness, cost and mlx-lm's GDN kernel."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta

from coordinator.doctor.finding import Verdict
from coordinator.doctor.kernels import check_exactness, check_gdn, products
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ModelConfig
from tests.conftest import Checkpoints


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    """Return the configuration of the built-in model."""
    return Checkpoint.open(checkpoint_dir()).config


def test_the_cpu_is_exact(config: ModelConfig) -> None:
    """On the CPU in fp32 every window gives the rows that single rows give."""
    finding = check_exactness(config, mx.float32)
    assert (finding.verdict, finding.values["exact"]) == (Verdict.OK, 8)


def test_attention_that_rounds_by_width_is_named(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention kernel that rounds differently from 4 queries on makes windows of 3 the last exact ones."""
    attend = mx.fast.scaled_dot_product_attention

    def rounded(q: mx.array, *args: Any, **options: Any) -> mx.array:
        out = attend(q, *args, **options)
        return out * 1.0001 if q.shape[2] > 3 else out

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", rounded)
    finding = check_exactness(config, mx.float32)
    assert finding.verdict is Verdict.WARN
    assert finding.values["exact"] == 3
    assert "--exact for equal answers" in finding.advice
    assert "attention over 300 keys" in finding.advice
    assert "--mtp 2" in finding.advice


def test_a_quantized_product_that_rounds_by_rows_is_named(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantized product whose single row is computed by another kernel makes no window exact."""
    quantized = Checkpoint.open(checkpoints(layout="mlx", quantize=4)).config
    assert {product.bits for product in products(quantized)} == {4}
    multiply = mx.quantized_matmul

    def rounded(x: mx.array, *args: Any, **options: Any) -> mx.array:
        out = multiply(x, *args, **options)
        return out * 1.0001 if x.shape[0] == 1 else out

    monkeypatch.setattr(mx, "quantized_matmul", rounded)
    finding = check_exactness(quantized, mx.float32)
    assert finding.verdict is Verdict.WARN
    assert finding.figure == "not exact in any window"
    assert "MLP up" in finding.advice
    assert "--mtp off" in finding.advice


def test_a_correct_gdn_kernel_passes(config: ModelConfig) -> None:
    """The kernel equals its reference, in windows and in a replay."""
    finding = check_gdn(config, mx.float32)
    assert finding.verdict is Verdict.OK
    assert finding.values == {"difference": 0.0, "windows_equal": True, "replay_equal": True}


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [(1.5, Verdict.FAIL, "garbage"), (1.0001, Verdict.WARN, "--mtp off")],
)
def test_a_wrong_gdn_kernel_is_named(
    config: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
    change: float,
    verdict: Verdict,
    words: str,
) -> None:
    """A kernel that is wrong in windows fails, and one that rounds differently in them warns."""
    update = gated_delta.gated_delta_update

    def wrong(q: mx.array, *args: Any, use_kernel: bool = True) -> Any:
        out, state = update(q, *args, use_kernel=use_kernel)
        return (out * change if use_kernel and q.shape[1] > 1 else out), state

    monkeypatch.setattr(gated_delta, "gated_delta_update", wrong)
    finding = check_gdn(config, mx.float32)
    assert finding.verdict is verdict
    assert words in finding.advice
