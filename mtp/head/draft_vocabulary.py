"""The draft vocabulary: drafts come from a part of the words, so lm_head reads only a part of its rows for them.

The part has the tokenizer's lowest tokens, which byte-pair encodings give to frequent words, and the words of recent
texts. Any draft is allowed, so the text does not depend on the part. The target always uses all words.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mtp.layers.select_blocks import Projection, can_select, select_blocks
from proto.errors import UsageError

BLOCK = 16
"""Neighbouring tokens that are selected together: a tile of the CUDA kernel for 4-bit weights."""

AUTO_TOKENS = 32768
"""Lowest tokens under `auto`: about an eighth of the words of Qwen3.5."""

RECENT_BLOCKS = 256
"""Blocks of `BLOCK` neighbouring tokens that the newest texts used, besides the lowest tokens."""

FORGETTING = 1 / 512
"""Weight of one token in the mean share of tokens outside the part, once there are many."""

ASSUMED = 32
"""Tokens inside the part that the mean begins with, so that the first ones outside it do not decide alone."""

TRIALS = 5
"""Timings of each kind, of which the best counts."""


@dataclass(frozen=True)
class DraftVocabularySize:
    """The value of `--draft-vocab`: the number of lowest tokens, 0 for all words. Under `auto` the part must pay."""

    tokens: int = 0
    auto: bool = False

    @classmethod
    def parse(cls, text: str) -> DraftVocabularySize:
        """Return the size that `N`, `auto` or `off` names. Raises UsageError for other text."""
        if text == "off":
            return cls()
        if text == "auto":
            return cls(AUTO_TOKENS, auto=True)
        if text.isdecimal() and len(text) < 9 and int(text) >= BLOCK:
            return cls(int(text))
        raise UsageError(
            f"--draft-vocab {text!r:.40}: write auto, off, or a number of tokens from {BLOCK} on"
        )


class DraftVocabulary:
    """The output projection over a part of the words. It replaces the whole one for drafts."""

    def __init__(
        self, module: Any, whole: Projection, vocab: int, size: DraftVocabularySize
    ) -> None:
        self.lowest = -(-size.tokens // BLOCK) * BLOCK
        self.saved = 0.0
        """Share of a draft's time that the part saves, as measured."""
        self.missed = 0.0
        """Mean share of the tokens of the texts that were outside the part when they were chosen."""
        self._chosen = 0
        self._vocab = vocab
        self._whole = whole
        self._module = module
        self._auto = size.auto
        self._low = select_blocks(module, slice(0, self.lowest // BLOCK), BLOCK)
        self._recent: dict[int, None] = {}
        self._gathered: Projection | None = None
        self._places = mx.zeros((0,), mx.int32)

    @property
    def in_use(self) -> bool:
        """True while drafts come from the part. A token outside it costs a draft, so few may be."""
        return not self._auto or self.missed < self.saved

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return the logits of `hidden [rows, hidden]`: `[rows, vocab]`, minus infinity outside the part."""
        return self._partial(hidden) if self.in_use else self._whole(hidden)

    def record_tokens(self, tokens: Sequence[int], *, chosen: bool) -> None:
        """Add the words of a text. The model has `chosen` the tokens of an answer, but not those of a prompt."""
        for token in tokens:
            block = token // BLOCK
            outside = token >= self.lowest and block not in self._recent
            if chosen:
                self._chosen += 1
                weight = max(FORGETTING, 1 / (ASSUMED + self._chosen))
                self.missed += weight * (outside - self.missed)
            if token < self.lowest:
                continue
            self._recent.pop(block, None)
            self._recent[block] = None
            if outside:
                self._gathered = None
        while len(self._recent) > RECENT_BLOCKS:
            del self._recent[next(iter(self._recent))]

    def measure(self, inputs: mx.array, hidden: mx.array, rest: Projection) -> None:
        """Time both projections on `inputs [1, hidden]`, and the `rest` of a draft on `hidden`."""
        whole, part = (_seconds(f, inputs) for f in (self._whole, self._partial))
        other = _seconds(rest, hidden)
        self.saved = max(0.0, (whole - part) / (whole + other))

    def _partial(self, hidden: mx.array) -> mx.array:
        if self._gathered is None:
            self._gathered = self._gather()
        low = self._low(hidden)
        outside = mx.full((hidden.shape[0], self._vocab - self.lowest), -mx.inf, low.dtype)
        logits = mx.concatenate([low, outside], axis=-1)
        logits[:, self._places] = self._gathered(hidden)
        return logits

    def _gather(self) -> Projection:
        """Gather the rows of recent words. There are always `RECENT_BLOCKS`, so that kernels are compiled once."""
        blocks = list(self._recent) or [0]
        blocks += blocks[-1:] * (RECENT_BLOCKS - len(blocks))
        taken = mx.array(blocks, mx.int32)
        self._places = (taken[:, None] * BLOCK + mx.arange(BLOCK, dtype=mx.int32)).reshape(-1)
        return select_blocks(self._module, taken, BLOCK)


def draft_vocabulary(
    module: Any, whole: Projection, vocab: int, size: DraftVocabularySize
) -> DraftVocabulary | None:
    """Return the part of the projection `module`, or None where it would save little or rows cannot be selected."""
    few = 2 * size.tokens <= vocab and vocab % BLOCK == 0
    if not size.tokens or not few or not can_select(module):
        return None
    return DraftVocabulary(module, whole, vocab, size)


def _seconds(function: Projection, x: mx.array) -> float:
    """Return the best of some timings, after one that compiles."""
    times = []
    for _ in range(TRIALS + 1):
        started = time.perf_counter()
        mx.eval(function(x))
        times.append(time.perf_counter() - started)
    return min(times[1:])
