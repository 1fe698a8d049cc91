"""One greedy answer with and without drafts: its tokens and its speed."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.doctor.checks import Finding, judged
from coordinator.drafts.controller import MtpMode
from coordinator.pipeline.local_pipeline import LocalPipeline
from coordinator.schedule import request
from coordinator.schedule.local_generator import local_generator
from coordinator.schedule.loop import GenerationLoop
from coordinator.text.tokenizer import Tokenizer
from mtp.checkpoint.format.checkpoint import Checkpoint

PROMPT = 'def median(values):\n    """Return the middle value of a sequence of numbers."""\n' * 8

WARM_UP_TOKENS = 32
"""Tokens before the measurement. CUDA compiles a kernel at the first use of each shape, which takes seconds."""


@dataclass(frozen=True)
class Answer:
    """The tokens of one answer, its statistics, and the layers with the trials of their kernels."""

    depth: int
    tokens: tuple[int, ...]
    stats: request.GenerationStats
    layers: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, without the prompt."""
        return (len(self.tokens) - 1) / max(self.stats.decode_seconds, 1e-9)


async def measure_answer(checkpoint: Checkpoint, depth: int, tokens: int) -> Answer:
    """Generate `tokens` tokens with `depth` drafts a window."""
    async with local_generator(checkpoint, mtp=MtpMode(depth), prefix_cache=False) as loop:
        prompt = Tokenizer.load(checkpoint.path, checkpoint.config.eos_token_ids).encode(PROMPT)
        await _generate(loop, prompt, WARM_UP_TOKENS)
        found, stats = await _generate(loop, prompt, tokens)
        own = loop.pipeline
        return Answer(depth, found, stats, own.layers if isinstance(own, LocalPipeline) else "")


async def _generate(
    loop: GenerationLoop, prompt: tuple[int, ...], tokens: int
) -> tuple[tuple[int, ...], request.GenerationStats]:
    found: list[int] = []
    async for event in request.generate(loop, request.GenerationRequest(prompt, tokens)):
        if isinstance(event, request.TokenChunk):
            found += event.tokens
        elif isinstance(event, request.Finished):
            return tuple(found), event.stats
    raise AssertionError("the answer has no end")


def judge_answer(plain: Answer) -> Finding:
    """Report the speed without drafts, and the layers and kernels."""
    prefill = plain.stats.prompt_tokens / max(plain.stats.prefill_seconds, 1e-9)
    values = {
        "prefill_tokens_per_second": prefill,
        "tokens_per_second": plain.tokens_per_second,
        "layers": plain.layers,
    }
    figure = f"prompt {prefill:.0f} tokens/s, answer {plain.tokens_per_second:.1f}. {plain.layers}"
    return judged("answer", figure, "", values)


def judge_drafts(plain: Answer, drafted: Answer) -> Finding:
    """Compare the tokens and the speed with drafts to those without."""
    pairs = zip(plain.tokens, drafted.tokens, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    stats = drafted.stats
    values = {
        "first_difference": place,
        "tokens_per_second": drafted.tokens_per_second,
        "tokens_per_window": (len(drafted.tokens) - 1) / max(stats.windows, 1),
        "accepted": stats.accepted,
        "drafted": stats.drafted,
    }
    equal = "equal tokens" if place is None else f"differs from token {place}"
    figure = f"{equal}, {drafted.tokens_per_second:.1f} tokens/s"
    advice = (
        "Rounding in windows changed the answer. Both are valid. Use --mtp off where the same request must always "
        "give the same answer."
    )
    slow = "Drafts do not pay for this text and model. --mtp auto leaves them off by itself."
    pays = drafted.tokens_per_second >= plain.tokens_per_second
    advice = advice if place is not None else "" if pays else slow
    return judged(f"answer with {drafted.depth} drafts", figure, advice, values)
