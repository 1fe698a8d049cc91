"""Checkpoints of other programs: the engine computes what transformers computes with the dequantized weights.

`tests/unit/mtp/test_packing.py` compares the dequantized weights with those of the programs themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from coordinator.schedule.request import GenerationRequest
from mtp.checkpoint.convert.convert import ConversionResult, Settings, convert
from mtp.checkpoint.convert.foreign import open_source
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.params import SamplingParams
from tests.parity.test_transformers import transformers_logits
from tests.support.checkpoints.foreign import FORMATS, write_dequantized, write_foreign
from tests.support.stages.local_run import Answered, run

pytestmark = pytest.mark.thorough

PROMPT = tuple(range(2, 22))
DEQUANTIZED = {
    "FP8 per tensor",
    "FP8 in blocks",
    "NVFP4 of ModelOpt",
    "NVFP4 of compressed-tensors",
}
"""The formats that MLX lacks."""

USUAL = ("FP8 in blocks", "NVFP4 of ModelOpt", "AutoRound")
"""Formats of each kind; the others are slow tests, because each needs a model of transformers."""


def answer(path: Path) -> Answered:
    """Return a greedy answer with its log-probabilities."""
    (found,) = run(path, [GenerationRequest(PROMPT, 6, SamplingParams(logprobs=0))])
    return found


def converted(source: Path, path: Path, settings: Settings) -> ConversionResult:
    """Convert a checkpoint of another program."""
    return convert(open_source(source), path, settings)


def oracle_logprobs(path: Path, tokens: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the log-probabilities that transformers gives the answer `tokens`."""
    logits = transformers_logits(path, [[*PROMPT, *tokens]])[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    places = np.arange(len(PROMPT) - 1, len(PROMPT) + len(tokens) - 1)
    assert [int(t) for t in logits[places].argmax(-1)] == list(tokens)
    return np.asarray(logprobs[places, list(tokens)])


@pytest.mark.parametrize(
    "form",
    [form if form in USUAL else pytest.param(form, marks=pytest.mark.slow) for form in FORMATS],
)
def test_a_conversion_computes_with_the_dequantized_weights(tmp_path: Path, form: str) -> None:
    """The answer of the conversion without flags is that of transformers on the dequantized weights."""
    moe = [*FORMATS].index(form) % 2 == 1
    source = write_foreign(tmp_path / "source", form, moe=moe, dtype=mx.float32)
    result = converted(source, tmp_path / "out", Settings())
    keeps_codes = Checkpoint.open(tmp_path / "out").config.quantization is not None
    assert keeps_codes is (form not in DEQUANTIZED)
    assert result.has_head
    found = answer(tmp_path / "out")
    expected = oracle_logprobs(write_dequantized(source, tmp_path / "plain"), found.tokens)
    assert [entry.logprob for entry in found.logprobs] == pytest.approx(expected, abs=1e-3)


def test_stock_mlx_lm_loads_a_conversion(tmp_path: Path) -> None:
    """Repacked GPTQ of 4 bits is mlx-lm's affine format, and mlx-lm computes the same logits."""
    source = write_foreign(tmp_path / "source", "GPTQ", dtype=mx.float32)
    converted(source, tmp_path / "out", Settings())
    found = answer(tmp_path / "out")
    model, _ = load_model(tmp_path / "out")
    logits = model(mx.array([[*PROMPT, *found.tokens]]))[0, len(PROMPT) - 1 : -1]
    logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    expected = [row[token] for row, token in zip(logprobs, found.tokens, strict=True)]
    assert [entry.logprob for entry in found.logprobs] == pytest.approx(expected, abs=1e-3)
