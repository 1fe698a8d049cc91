"""Prompts from the standard library: modules the built-in model was trained on, and modules it has never seen."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from coordinator.text.tokenizer import Tokenizer

PROMPT_TOKENS = 128

HELD_OUT = frozenset(
    "bisect calendar chunk cmd colorsys configparser csv filecmp fileinput fractions getpass glob graphlib heapq "
    "linecache netrc numbers plistlib pprint queue quopri sched secrets shlex textwrap timeit wave zipapp".split()
)
"""The modules of the standard library that the built-in model was not trained on."""

Prompts = Sequence[tuple[int, ...]]


def held_out_prompts(tokenizer: Tokenizer, count: int) -> Prompts:
    """Return prompts from modules of which no version was in the built-in model's training text."""
    return _prompts(tokenizer, [file for file in _library() if file.stem in HELD_OUT], count)


def seen_prompts(tokenizer: Tokenizer, count: int) -> Prompts:
    """Return prompts from modules of which some version was in the training text."""
    return _prompts(tokenizer, [file for file in _library() if file.stem not in HELD_OUT], count)


def _library() -> list[Path]:
    """Return modules that are one file, long enough for a prompt."""
    files = Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")
    return sorted(file for file in files if file.stat().st_size > 8 * PROMPT_TOKENS)


def _prompts(tokenizer: Tokenizer, files: Sequence[Path], count: int) -> Prompts:
    """Return PROMPT_TOKENS tokens from each of `count` evenly spread files, the same at every call.

    Files repeat if there are fewer than `count`.
    """
    places = random.Random(0)
    prompts = []
    for i in range(count):
        file = files[i * max(1, len(files) // count) % len(files)]
        tokens = tokenizer.encode(file.read_text(encoding="utf-8"))
        start = places.randrange(len(tokens) - PROMPT_TOKENS)
        prompts.append(tokens[start : start + PROMPT_TOKENS])
    return prompts
