"""One greedy answer with and without drafts: its tokens, its speed, and the cost of a pause."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from coordinator.doctor.checks import Finding, Verdict, judged
from coordinator.drafts.controller import MtpMode
from coordinator.schedule import request
from coordinator.schedule.local_generator import local_generator
from coordinator.schedule.loop import GenerationLoop
from coordinator.text.tokenizer import Tokenizer
from mtp.checkpoint.format.checkpoint import Checkpoint

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
    stats: request.GenerationStats
    restart: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, without the prompt."""
        return (len(self.tokens) - 1) / max(self.stats.decode_seconds, 1e-9)

    @property
    def step_seconds(self) -> float:
        """Seconds of one verify window."""
        return self.stats.decode_seconds / max(self.stats.windows, 1)


async def measure_answer(
    checkpoint: Checkpoint, depth: int, tokens: int, *, pause: bool = False, exact: bool = False
) -> Answer:
    """Generate `tokens` tokens with `depth` drafts a window, and with `pause` a second answer after a pause."""
    tokenizer = Tokenizer.load(checkpoint.path, checkpoint.config.eos_token_ids)
    prompt = tokenizer.encode(PROMPT)
    async with local_generator(
        checkpoint, mtp=MtpMode(depth), prefix_cache=False, exact=exact
    ) as loop:
        await _generate(loop, prompt, WARM_UP_TOKENS)
        found, stats = await _generate(loop, prompt, tokens)
        answer = Answer(depth, found, stats)
        if not pause:
            return answer
        await asyncio.sleep(PAUSE_SECONDS)
        after, later = await _generate(loop, prompt[:1], 4)
        seconds = later.decode_seconds / max(len(after) - 1, 1)
        before = stats.decode_seconds / max(len(found) - 1, 1)
        return replace(answer, restart=seconds / max(before, 1e-9))


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


def judge_identity(plain: Answer, drafted: Answer) -> Finding:
    """Compare the tokens with drafts to the tokens without."""
    name = f"answer with {drafted.depth} drafts"
    pairs = zip(plain.tokens, drafted.tokens, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    values = {"tokens": len(plain.tokens), "first_difference": place}
    if place is None and len(plain.tokens) == len(drafted.tokens):
        return judged(name, f"{len(plain.tokens)} tokens equal", "", values)
    advice = (
        "Rounding in windows changed the answer. Both are valid. Use --mtp off where the same request must always "
        "give the same answer."
    )
    return judged(name, f"differs from token {place}", advice, values)


def judge_exact(plain: Answer, exact: Answer, drafted: Answer | None) -> Finding:
    """Report the price of --exact, and whether its answers with drafts equal those without."""
    cost = exact.step_seconds / max(plain.step_seconds, 1e-9) - 1
    values = {"cost": cost, "equal": drafted is None or drafted.tokens == exact.tokens}
    figure = f"--exact costs {max(0.0, cost):.0%} of plain decoding"
    if not values["equal"]:
        advice = "Answers with drafts still differ with --exact. Please report it with --json."
        return Finding("exact mode", Verdict.FAIL, figure, advice, values)
    return judged("exact mode", figure, "", values)


def break_even(cost: float, drafts: int) -> float | None:
    """Return the acceptance per draft from which windows that cost `cost` steps pay; None if they never do.

    With acceptance p a window of k drafts gives 1 + p + … + p^k tokens.
    """
    if cost > 1 + drafts:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        gives = sum(middle**i for i in range(drafts + 1))
        low, high = (low, middle) if gives >= cost else (middle, high)
    return high


def judge_speed(plain: Answer, drafted: Answer) -> Finding:
    """Compare the speed with drafts to the speed without."""
    ratio = drafted.step_seconds / max(plain.step_seconds, 1e-9)
    per_window = (len(drafted.tokens) - 1) / max(drafted.stats.windows, 1)
    first = drafted.stats.drafted_by_position[:1]
    acceptance = drafted.stats.accepted_by_position[0] / first[0] if first and first[0] else None
    pays_from = break_even(ratio, drafted.depth)
    prefill = plain.stats.prompt_tokens / max(plain.stats.prefill_seconds, 1e-9)
    slow, fast = plain.tokens_per_second, drafted.tokens_per_second
    values = {
        "prefill_tokens_per_second": prefill,
        "plain_tokens_per_second": slow,
        "drafts": drafted.depth,
        "drafted_tokens_per_second": fast,
        "window_cost": ratio,
        "tokens_per_window": per_window,
        "first_acceptance": acceptance,
        "break_even_acceptance": pays_from,
    }
    pays = "never pays" if pays_from is None else f"pays from an acceptance of {pays_from:.2f}"
    figure = (
        f"prompt {prefill:.0f} tokens/s, plain {slow:.1f}, with {drafted.depth} drafts {fast:.1f}. "
        f"A window costs {ratio:.2f} steps and gives {per_window:.2f} tokens; it {pays}"
    )
    advice = "Drafting does not pay for this text and model. --mtp auto leaves it off by itself."
    return judged("speed", figure, advice if per_window < ratio else "", values)


def judge_restart(answer: Answer) -> Finding:
    """Report weights that the system pages out while the model is idle."""
    ratio = answer.restart or 1.0
    figure = f"a token takes {ratio:.1f} times as long after {PAUSE_SECONDS:g} s"
    values = {"ratio": ratio}
    advice = (
        "The system pages idle weights out. Use macOS 15 or later, leave --no-wired-memory away, and lower "
        "--memory-limit if other programs need memory."
    )
    return judged("restart after a pause", figure, advice if ratio >= SLOW_RESTART else "", values)
