"""A chain of stages agrees with the transformers implementation on a raw checkpoint that both read.

Other tests compare the stages with stock mlx-lm, bit for bit. So the fixture is a Qwen3.5 checkpoint by the rules of
both for names, norms and convolutions.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import Checkpoints
from tests.support.stages.chain import Chain, Script, random_tokens

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
transformers = pytest.importorskip("transformers")

LENGTH = 40
"""Tokens of a prompt that is longer than the convolution, the head dimension and a GDN chunk's remainder."""

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
    assert not loading["missing_keys"], "the model initialized these weights instead of reading them"
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits
    return np.asarray(logits.numpy())


def relative_error(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> float:
    """Return the largest difference of logits over the largest logit."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def chain_logits(chain: Chain, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Return the logits `[L, vocab]` of a chain at every position of a prompt."""
    script = Script(0, tokens)
    rows = []
    for _ in tokens:
        chain.send(script.chunk(1), ops=script.due())
        rows.append(chain.logits[0])
    return np.array(mx.concatenate(rows))


UNNORMALIZED = (("norm_topk_prob", False),)
"""A field that transformers ignores in Qwen3.5 and follows in Qwen3-Next."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"moe": True, "tie": False},
        {"moe": True, "fields": UNNORMALIZED},
        {"moe": True, "tie": False, "qwen3_next": True, "fields": (("mlp_only_layers", (0, 3)),)},
        {"moe": True, "qwen3_next": True, "fields": UNNORMALIZED},
    ],
    ids=[
        "dense",
        "experts, untied",
        "experts, norm_topk_prob",
        "Qwen3-Next, two dense layers",
        "Qwen3-Next, norm_topk_prob",
    ],
)
def test_a_chain_of_stages_agrees_with_transformers(checkpoints: Checkpoints, options: dict[str, Any]) -> None:
    """Logits at every position of a prompt differ by at most 1e-4 of the largest, in fp32, whole and cut in three."""
    path = checkpoints(**options)
    tokens = random_tokens(LENGTH)
    theirs = transformers_logits(path, [tokens])[0]
    for cuts in ((), (3, 4)):
        assert relative_error(chain_logits(Chain(path, cuts), tokens), theirs) <= 1e-4
    assert np.abs(theirs).max() > 1, "logits near 0 agree for any model"


def test_rope_fields_at_their_old_place_give_transformers_logits(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A linear `rope_scaling` of an older exporter changes the logits exactly as it does in transformers."""
    path = tmp_path / "old"
    shutil.copytree(checkpoints(), path)
    config = json.loads((path / "config.json").read_text())
    del config["text_config"]["rope_parameters"]
    config["text_config"] |= {
        "rope_theta": 20000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    (path / "config.json").write_text(json.dumps(config))
    tokens = random_tokens(LENGTH)
    theirs = transformers_logits(path, [tokens])[0]
    assert relative_error(chain_logits(Chain(path), tokens), theirs) <= 1e-4
    assert relative_error(transformers_logits(checkpoints(), [tokens])[0], theirs) > 1e-3
