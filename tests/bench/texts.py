"""Prompts from the standard library: modules the built-in model has read, and modules it has never seen."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from coordinator.text.tokenizer import Tokenizer
from mtp.builtin.training.corpus import HELD_OUT

PROMPT_TOKENS = 128

Prompts = Sequence[tuple[int, ...]]


def held_out_prompts(tokenizer: Tokenizer, count: int) -> Prompts:
    """Of modules the built-in model was not trained on, in no version of them."""
    return _prompts(tokenizer, [file for file in _library() if file.stem in HELD_OUT], count)


def seen_prompts(tokenizer: Tokenizer, count: int) -> Prompts:
    """Of modules that were in its training text, perhaps in another version."""
    return _prompts(tokenizer, [file for file in _library() if file.stem not in HELD_OUT], count)


def _library() -> list[Path]:
    """Modules that are a file, long enough to cut a prompt from."""
    files = Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")
    return sorted(file for file in files if file.stat().st_size > 8 * PROMPT_TOKENS)


def _prompts(tokenizer: Tokenizer, files: Sequence[Path], count: int) -> Prompts:
    """PROMPT_TOKENS from somewhere in `count` files evenly spread, some twice if need be. The same at every call."""
    places = random.Random(0)
    prompts = []
    for i in range(count):
        file = files[i * max(1, len(files) // count) % len(files)]
        tokens = tokenizer.encode(file.read_text(encoding="utf-8"))
        start = places.randrange(len(tokens) - PROMPT_TOKENS)
        prompts.append(tokens[start : start + PROMPT_TOKENS])
    return prompts
