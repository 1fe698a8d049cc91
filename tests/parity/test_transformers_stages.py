"""A chain of stages agrees with the transformers implementation on a raw checkpoint that both read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import Checkpoints
from tests.parity.test_transformers import relative_error, transformers_logits
from tests.support.stages.chain import Chain, Script, random_tokens

LENGTH = 40

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
def test_a_chain_of_stages_agrees_with_transformers(
    checkpoints: Checkpoints, options: dict[str, Any]
) -> None:
    """Logits at every position of a prompt differ by at most 1e-4 of the largest, in fp32, whole and cut in three."""
    path = checkpoints(**options)
    tokens = random_tokens(LENGTH)
    theirs = transformers_logits(path, [tokens])[0]
    for cuts in ((), (3, 4)):
        chain = Chain(path, cuts)
        script = Script(0, tokens)
        rows = []
        for _ in range(LENGTH):
            chain.send(script.chunk(1), ops=script.due())
            rows.append(chain.logits[0])
        assert relative_error(np.array(mx.concatenate(rows)), theirs) <= 1e-4


def test_rope_fields_at_their_old_place_give_transformers_logits(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
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
    chain = Chain(path)
    script = Script(0, tokens)
    rows = []
    for _ in range(LENGTH):
        chain.send(script.chunk(1), ops=script.due())
        rows.append(chain.logits[0])
    ours = np.array(mx.concatenate(rows))
    assert relative_error(ours, theirs) <= 1e-4
    assert relative_error(transformers_logits(checkpoints(), [tokens])[0], theirs) > 1e-3
