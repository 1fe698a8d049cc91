"""The check of the kernels: one greedy answer with and without drafts."""

from __future__ import annotations

from typing import Any

from coordinator.doctor.checks import Finding, judged
from coordinator.drafts.controller import MtpMode
from coordinator.pipeline.local_pipeline import LocalPipeline
from coordinator.schedule import request
from coordinator.schedule.local_generator import local_generator
from coordinator.schedule.loop import GenerationLoop
from coordinator.text.tokenizer import Tokenizer
from mtp.checkpoint.format.checkpoint import Checkpoint

PROMPT = 'def median(values):\n    """Return the middle value of a sequence of numbers."""\n' * 8

DRAFTS = 2
"""Drafts of a window, so that the kernels for several rows run."""

WARM_UP_TOKENS, TOKENS = 32, 64
"""Tokens before the measurement, because CUDA compiles a kernel at the first use of each shape, and measured ones."""


async def check_kernels(checkpoint: Checkpoint) -> Finding:
    """Report the layers with their kernels, the speed of an answer, and whether drafts change its tokens."""
    layers, plain, speed = await _measure(checkpoint, 0)
    values: dict[str, Any] = {"layers": layers, "tokens_per_second": speed}
    figure = f"{layers}; {speed:.1f} tokens/s"
    if not checkpoint.mtp.complete:
        return judged("kernels", figure, "", values)
    _, drafted, speed = await _measure(checkpoint, DRAFTS)
    pairs = enumerate(zip(plain, drafted, strict=False))
    place = next((i for i, (one, other) in pairs if one != other), None)
    values |= {"first_difference": place, "drafted_tokens_per_second": speed}
    equal = "equal tokens" if place is None else f"other tokens from {place}"
    figure += f", {speed:.1f} with {DRAFTS} drafts and {equal}"
    advice = (
        "Rounding in windows changed the answer. Both are valid. Use --mtp off where the same request must always "
        "give the same answer."
    )
    return judged("kernels", figure, "" if place is None else advice, values)


async def _measure(checkpoint: Checkpoint, drafts: int) -> tuple[str, tuple[int, ...], float]:
    """Return the layers for people, the tokens of an answer with `drafts` a window, and its tokens a second."""
    async with local_generator(checkpoint, mtp=MtpMode(drafts), prefix_cache=False) as loop:
        prompt = Tokenizer.load(checkpoint.path, checkpoint.config.eos_token_ids).encode(PROMPT)
        await _generate(loop, prompt, WARM_UP_TOKENS)
        tokens, seconds = await _generate(loop, prompt, TOKENS)
        own = loop.pipeline
        speed = (len(tokens) - 1) / max(seconds, 1e-9)
        return own.layers if isinstance(own, LocalPipeline) else "", tokens, speed


async def _generate(loop: GenerationLoop, prompt: tuple[int, ...], tokens: int) -> tuple[tuple[int, ...], float]:
    found: list[int] = []
    async for event in request.generate(loop, request.GenerationRequest(prompt, tokens)):
        if isinstance(event, request.TokenChunk):
            found += event.tokens
        elif isinstance(event, request.Finished):
            return tuple(found), event.stats.decode_seconds
    raise AssertionError("the answer has no end")
