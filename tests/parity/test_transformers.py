"""Stock mlx-lm agrees with the transformers implementation on the raw checkpoints of these tests.

Both read the same files by their own rules for names, norms and convolutions. Their agreement makes the fixture a
Qwen3.5 checkpoint, and mlx-lm the reference for all other tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from tests.conftest import Checkpoints

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
transformers = pytest.importorskip("transformers")

TOKENS = [[(7 * i * i + 3 * i) % 250 for i in range(40)]]
"""A prompt longer than the convolution, the head dimension and a GDN chunk's remainder."""

_CLASSES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def transformers_logits(path: Path, tokens: list[list[int]]) -> np.ndarray[Any, Any]:
    """Return logits `[B, L, vocab]` in fp32 on the CPU, loaded and computed by transformers."""
    config = transformers.AutoConfig.from_pretrained(path)
    config = getattr(config, "text_config", config)
    name = _CLASSES[config.model_type]
    model, loading = getattr(transformers, name).from_pretrained(
        path, config=config, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"], (
        "the model initialized these weights instead of reading them"
    )
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits
    return np.asarray(logits.numpy())


def relative_error(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> float:
    """Return the largest difference of logits over the largest logit."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie": False, "shards": 3},
        {"moe": True},
        {"moe": True, "tie": False},
        {"moe": True, "tie": False, "qwen3_next": True},
    ],
    ids=["dense", "dense-untied-sharded", "moe", "moe-untied", "qwen3-next"],
)
def test_mlx_lm_and_transformers_agree(checkpoints: Checkpoints, options: dict[str, Any]) -> None:
    """Logits over a prompt differ by at most 1e-4 of the largest, in fp32."""
    path = checkpoints(**options)
    model, _ = load_model(path)
    ours = np.array(model(mx.array(TOKENS)))
    theirs = transformers_logits(path, TOKENS)
    assert relative_error(ours, theirs) <= 1e-4
    assert np.abs(theirs).max() > 1, "logits near 0 agree for any model"
