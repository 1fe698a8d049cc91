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

from coordinator.generation.request import GenerationRequest
from mtp.checkpoint.convert.convert import ConversionResult, convert
from mtp.checkpoint.convert.settings import Quantization, Settings
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.params import SamplingParams
from tests.parity.test_transformers import transformers_logits
from tests.support.checkpoints.foreign import FORMATS, write_dequantized, write_foreign
from tests.support.stages.local_run import Answered, run

PROMPT = tuple(range(2, 22))
BLOCKS = "FP8 in blocks"
SERVED = [form for form in FORMATS if form != BLOCKS]
USUAL = ("FP8 per row", "NVFP4 of ModelOpt", "GPTQ desc_act", "AWQ")
"""One format of each kind of layer; the others are slow tests, because each needs a model of transformers."""


def answer(path: Path) -> Answered:
    """Return a greedy answer with its log-probabilities."""
    (found,) = run(path, [GenerationRequest(PROMPT, 6, SamplingParams(logprobs=0))])
    return found


def converted(source: Path, path: Path, settings: Settings) -> ConversionResult:
    """Convert a checkpoint of another program."""
    return convert(Checkpoint.open(source, to_convert=True), path, settings)


def oracle_logprobs(path: Path, tokens: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the log-probabilities that transformers gives the answer `tokens`."""
    logits = transformers_logits(path, [[*PROMPT, *tokens]])[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    places = np.arange(len(PROMPT) - 1, len(PROMPT) + len(tokens) - 1)
    assert [int(t) for t in logits[places].argmax(-1)] == list(tokens)
    return np.asarray(logprobs[places, list(tokens)])


@pytest.mark.parametrize(
    "form",
    [form if form in USUAL else pytest.param(form, marks=pytest.mark.slow) for form in SERVED],
)
def test_a_served_checkpoint_computes_with_the_dequantized_weights(
    tmp_path: Path, form: str
) -> None:
    """The answer of the checkpoint, repacked while loading, is that of transformers on its dequantized weights."""
    moe = SERVED.index(form) % 2 == 1 and "desc_act" not in form
    source = write_foreign(tmp_path / "source", form, moe=moe, dtype=mx.float32)
    found = answer(source)
    plain = write_dequantized(source, tmp_path / "plain")
    expected = oracle_logprobs(plain, found.tokens)
    assert [entry.logprob for entry in found.logprobs] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("form", USUAL)
def test_a_conversion_has_the_bits_of_the_served_checkpoint(tmp_path: Path, form: str) -> None:
    """`convert` without flags repacks as the loader does, the head included, and says so."""
    source = write_foreign(tmp_path / "source", form, dtype=mx.float32)
    result = converted(source, tmp_path / "out", Settings())
    ((way, found),) = result.ways.items()
    assert way.startswith("repacked in ")
    assert found.modules == 33
    assert found.error is not None and found.error < 1e-6
    ours, theirs = answer(tmp_path / "out"), answer(source)
    assert (ours.tokens, ours.logprobs) == (theirs.tokens, theirs.logprobs)


def test_stock_mlx_lm_loads_a_conversion_without_extras(tmp_path: Path) -> None:
    """Repacked GPTQ of 4 bits is mlx-lm's affine format, and mlx-lm computes the same logits."""
    source = write_foreign(tmp_path / "source", "GPTQ 4 bit", dtype=mx.float32)
    result = converted(source, tmp_path / "out", Settings())
    assert result.for_mlx_lm
    found = answer(source)
    model, _ = load_model(tmp_path / "out")
    logits = model(mx.array([[*PROMPT, *found.tokens]]))[0, len(PROMPT) - 1 : -1]
    logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    expected = [row[token] for row, token in zip(logprobs, found.tokens, strict=True)]
    assert [entry.logprob for entry in found.logprobs] == pytest.approx(expected, abs=1e-3)


def test_blocks_of_fp8_are_quantized_anew_within_the_error_of_the_format(tmp_path: Path) -> None:
    """The added error is reported; at 8 bits it is a fifth of the error of FP8 itself."""
    source = write_foreign(tmp_path / "source", BLOCKS, dtype=mx.float32)
    result = converted(source, tmp_path / "out", Settings(Quantization.of(8, 32)))
    found = result.ways["quantized anew in 8 bit affine"]
    assert found.modules == 32
    assert result.ways["dequantized to float32"].modules == 1, "mtp.fc stays unquantized"
    assert found.error is not None and 0 < found.error < 0.006
    expected = oracle_logprobs(
        write_dequantized(source, tmp_path / "plain"), answer(tmp_path / "plain").tokens
    )
    ours = answer(tmp_path / "out")
    assert [entry.logprob for entry in ours.logprobs] == pytest.approx(expected, abs=0.3)
