"""mlx-lm's GDN kernel in the doctor's report."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta

from coordinator.doctor.checks import Verdict, check_gdn
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ModelConfig


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    """Return the configuration of the built-in model."""
    return Checkpoint.open(checkpoint_dir()).config


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
