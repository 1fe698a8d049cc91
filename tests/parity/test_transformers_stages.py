"""A chain of stages agrees with the transformers implementation on a raw checkpoint that both read."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import Checkpoints
from tests.parity.test_transformers import relative_error, transformers_logits
from tests.support.stages.chain import Chain, Script, random_tokens

LENGTH = 40


@pytest.mark.parametrize(
    "options", [{}, {"moe": True, "tie": False}], ids=["dense", "experts, untied"]
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
