"""`--exact` on emulated kernels whose rounding depends on the rows of a call, as those of GPUs do.

Without the flag drafts and other requests change the answers there; with it they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from coordinator.schedule.request import GenerationRequest
from mtp.builtin import checkpoint_dir
from mtp.device import DEVICES, Arithmetic
from proto.params import SamplingParams
from tests.support.stages.local_run import Answered, run

SPREAD = 0.02
"""Relative difference between two emulated kernels. It is large, so that a few tokens show it."""

PROMPTS = [(5, 6, 7, 8), tuple(range(40, 75))]


def kernel_of(rows: int) -> float:
    """Return the factor of the kernel for `rows` rows, with limits like those of MLX on CUDA."""
    return 1.0 if rows == 1 else 1 + SPREAD if rows < 600 else 1 - SPREAD


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make products and attention round by the rows of a call, and name the machine a CUDA one."""
    linear, attention = nn.Linear.__call__, mx.fast.scaled_dot_product_attention

    def rounded_linear(self: nn.Linear, x: mx.array) -> mx.array:
        return linear(self, x) * kernel_of(x.shape[0])

    def rounded_unembedding(self: nn.Embedding, x: mx.array) -> mx.array:
        return (x @ self.weight.T) * kernel_of(x.shape[0])

    def rounded_attention(q: mx.array, *args: Any, **options: Any) -> mx.array:
        return attention(q, *args, **options) * kernel_of(q.shape[2])

    monkeypatch.setattr(nn.Linear, "__call__", rounded_linear)
    monkeypatch.setattr(nn.Embedding, "as_linear", rounded_unembedding)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", rounded_attention)
    here = classmethod(lambda cls: Arithmetic("cuda", "emulated", "1"))
    monkeypatch.setattr(Arithmetic, "here", here)
    monkeypatch.setitem(DEVICES, "cuda", replace(DEVICES["cuda"], exact_probe_rows=32))


def requests() -> list[GenerationRequest]:
    """Return greedy and sampled requests with log-probabilities."""
    settings = [SamplingParams(logprobs=2), SamplingParams(temperature=0.9, seed=3, logprobs=2)]
    return [GenerationRequest(prompt, 4, params) for prompt in PROMPTS for params in settings]


def facts(answers: Sequence[Answered]) -> list[object]:
    """Return tokens and log-probabilities."""
    return [(answer.tokens, answer.logprobs) for answer in answers]


def variants(**options: Any) -> list[list[object]]:
    """Return the answers alone without drafts, with drafts, together, and together with drafts over two stages."""
    path, common = checkpoint_dir(), {"dtype": "float32", **options}
    return [
        facts(run(path, requests(), mtp="off", one_by_one=True, **common)),
        facts(run(path, requests(), mtp="2", one_by_one=True, **common)),
        facts(run(path, requests(), mtp="off", **common)),
        facts(run(path, requests(), mtp="filled", stages=2, **common)),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_the_emulated_kernels_change_answers() -> None:
    """Proof that the next test could fail."""
    alone, *others = variants()
    assert all(other != alone for other in others)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("kv_bits", [None, pytest.param(8, marks=pytest.mark.slow)])
def test_exact_answers_do_not_depend_on_drafts_batch_or_cut(kv_bits: int | None) -> None:
    """Quantized keys and values are exact too: they are attended to row by row."""
    alone, *others = variants(exact=True, kv_bits=kv_bits)
    assert all(other == alone for other in others)
