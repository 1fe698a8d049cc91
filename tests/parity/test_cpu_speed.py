"""Plain decoding on a CPU against stock mlx-lm, in one process by turns."""

from __future__ import annotations

import sys
import time
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step

from coordinator.drafts.controller import MtpMode
from coordinator.schedule.local_generator import local_generator
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.request import GenerationRequest, TokenChunk, generate
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint

TOKENS = 60
"""Tokens of an answer whose processor time counts: those after the first one."""

LEAST, MOST = 3, 12
"""Rounds. Other load on the machine slows one side down, so further rounds follow as long as the ratio is too low."""

RATIO = 1.3

PROMPT = tuple(range(100, 140))


def stock_seconds(model: Any) -> float:
    """Return the processor time of a token with mlx-lm's own generator."""
    began = 0.0
    for number, _ in enumerate(generate_step(mx.array(PROMPT), model, max_tokens=TOKENS + 1)):
        began = began if number else time.process_time()
    return (time.process_time() - began) / TOKENS


async def own_seconds(loop: GenerationLoop) -> float:
    """Return the processor time of a token with this project, from the request to its events."""
    began, count = 0.0, 0
    async for event in generate(loop, GenerationRequest(PROMPT, TOKENS + 1)):
        if isinstance(event, TokenChunk):
            began = began or time.process_time()
            count += len(event.tokens)
    return (time.process_time() - began) / (count - 1)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="another BLAS")
async def test_plain_decoding_takes_less_processor_time_than_stock_mlx_lm() -> None:
    """The built-in model decodes 1.3 times as many tokens in a second of processor time, at the best of each side."""
    model: Any = load(str(checkpoint_dir()))[0]
    stock, own = list[float](), list[float]()
    async with local_generator(Checkpoint.open(checkpoint_dir()), mtp=MtpMode(0)) as loop:
        while len(own) < LEAST or (min(stock) < RATIO * min(own) and len(own) < MOST):
            stock.append(stock_seconds(model))
            own.append(await own_seconds(loop))
    print(f"tokens/s of processor time: stock {1 / min(stock):.1f}, own {1 / min(own):.1f}")
    assert min(stock) >= RATIO * min(own), (stock, own)
