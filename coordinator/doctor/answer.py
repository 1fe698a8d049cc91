"""One greedy answer with and without drafts: its tokens, its speed, and the cost of a pause."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from coordinator.doctor.finding import Finding, Verdict
from coordinator.generation.loop import GenerationLoop
from coordinator.generation.request import Finished, GenerationRequest, GenerationStats, TokenChunk
from coordinator.local_engine.generator import local_generator
from coordinator.text.tokenizer import Tokenizer
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.depth.controller import MtpMode

PROMPT = 'def median(values):\n    """Return the middle value of a sequence of numbers."""\n' * 8

WARM_UP_TOKENS = 32
"""Tokens before the measurement. CUDA compiles a kernel at the first use of each shape, which takes seconds."""

PAUSE_SECONDS = 3.0
"""Seconds. macOS unwires idle memory after about one."""

SLOW_RESTART = 2.0
"""Ratio of a token's time after a pause to the time before. Above it, weights were paged out."""


@dataclass(frozen=True)
class Answer:
    """The tokens of one answer and its statistics. `restart` is the ratio of a token's time after a pause."""

    depth: int
    tokens: tuple[int, ...]
    stats: GenerationStats
    restart: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, without the prompt."""
        return (len(self.tokens) - 1) / max(self.stats.decode_seconds, 1e-9)

    @property
    def step_seconds(self) -> float:
        """Seconds of one verify window."""
        return self.stats.decode_seconds / max(self.stats.windows, 1)


async def measure_answer(checkpoint: Checkpoint, depth: int, tokens: int, *, pause: bool) -> Answer:
    """Generate `tokens` tokens with `depth` drafts a window. With `pause`, measure a second answer after a pause."""
    tokenizer = Tokenizer.load(checkpoint.path, checkpoint.config.eos_token_ids)
    prompt = tokenizer.encode(PROMPT)
    async with local_generator(checkpoint, mtp=MtpMode(depth), prefix_cache=False) as loop:
        await _generate(loop, prompt, WARM_UP_TOKENS)
        found, stats = await _generate(loop, prompt, tokens)
        answer = Answer(depth, found, stats)
        if not pause:
            return answer
        await asyncio.sleep(PAUSE_SECONDS)
        after, later = await _generate(loop, prompt[:1], 4)
        seconds = later.decode_seconds / max(len(after) - 1, 1)
        before = stats.decode_seconds / max(len(found) - 1, 1)
        return Answer(depth, found, stats, seconds / max(before, 1e-9))


async def _generate(
    loop: GenerationLoop, prompt: tuple[int, ...], tokens: int
) -> tuple[tuple[int, ...], GenerationStats]:
    found: list[int] = []
    async for event in loop.generate(GenerationRequest(prompt, tokens)):
        if isinstance(event, TokenChunk):
            found += event.tokens
        elif isinstance(event, Finished):
            return tuple(found), event.stats
    raise AssertionError("the answer has no end")


def judge_identity(plain: Answer, drafted: Answer) -> Finding:
    """Compare the tokens with drafts to the tokens without."""
    name = f"answer with {drafted.depth} drafts"
    pairs = zip(plain.tokens, drafted.tokens, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    values = {"tokens": len(plain.tokens), "first_difference": place}
    if place is None and len(plain.tokens) == len(drafted.tokens):
        return Finding(name, Verdict.OK, f"{len(plain.tokens)} tokens equal", "", values)
    advice = (
        "Rounding in windows changed the answer. Both are valid. Use --mtp off where the same request must always "
        "give the same answer."
    )
    return Finding(name, Verdict.WARN, f"differs from token {place}", advice, values)


def judge_speed(plain: Answer, drafted: Answer) -> Finding:
    """Compare the speed with drafts to the speed without."""
    ratio = drafted.step_seconds / max(plain.step_seconds, 1e-9)
    per_window = (len(drafted.tokens) - 1) / max(drafted.stats.windows, 1)
    first = drafted.stats.drafted_by_position[:1]
    acceptance = drafted.stats.accepted_by_position[0] / first[0] if first and first[0] else None
    prefill = plain.stats.prompt_tokens / max(plain.stats.prefill_seconds, 1e-9)
    values = {
        "prefill_tokens_per_second": prefill,
        "plain_tokens_per_second": plain.tokens_per_second,
        "drafts": drafted.depth,
        "drafted_tokens_per_second": drafted.tokens_per_second,
        "window_cost": ratio,
        "tokens_per_window": per_window,
        "first_acceptance": acceptance,
    }
    figure = (
        f"prompt {prefill:.0f} tokens/s, plain {plain.tokens_per_second:.1f}, with {drafted.depth} drafts "
        f"{drafted.tokens_per_second:.1f}. A window costs {ratio:.2f} steps and gives {per_window:.2f} tokens"
    )
    if per_window < ratio:
        advice = (
            "Drafting does not pay for this text and model. --mtp auto leaves it off by itself."
        )
        return Finding("speed", Verdict.WARN, figure, advice, values)
    return Finding("speed", Verdict.OK, figure, "", values)


def judge_restart(answer: Answer) -> Finding:
    """Report weights that the system pages out while the model is idle."""
    ratio = answer.restart or 1.0
    figure = f"a token takes {ratio:.1f} times as long after {PAUSE_SECONDS:g} s"
    values = {"ratio": ratio}
    if ratio < SLOW_RESTART:
        return Finding("restart after a pause", Verdict.OK, figure, "", values)
    advice = (
        "The system pages idle weights out. Use macOS 15 or later, leave --no-wired-memory away, and lower "
        "--memory-limit if other programs need memory."
    )
    return Finding("restart after a pause", Verdict.WARN, figure, advice, values)
