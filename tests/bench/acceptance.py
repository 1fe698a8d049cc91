"""The share of accepted drafts by position: greedy and sampled, seen and unseen text.

    python -m tests.bench.acceptance

The table is Markdown, for docs/mtp.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from coordinator.schedule.request import GenerationRequest
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from proto.params import SamplingParams
from tests.bench.machine import about
from tests.bench.report import lines, publish
from tests.bench.texts import Prompts, held_out_prompts, seen_prompts
from tests.support.stages.local_run import Answered, run

DEPTH = 4
TEMPERATURES = (0.0, 0.6, 0.8, 1.0)


def by_position(found: Sequence[Answered]) -> list[float]:
    """Return, for each position, the share of windows with a draft there that accepted it."""
    drafted, accepted = np.zeros(DEPTH), np.zeros(DEPTH)
    for answer in found:
        reached = len(answer.stats.drafted_by_position)
        drafted[:reached] += answer.stats.drafted_by_position
        accepted[:reached] += answer.stats.accepted_by_position
    return [float(x) for x in accepted / drafted]


def tokens_per_window(found: Sequence[Answered]) -> float:
    """Return the mean tokens a window. The first token of an answer comes from the prompt and is not counted."""
    return sum(len(a.tokens) - 1 for a in found) / sum(a.stats.windows for a in found)


def acceptance_rows(path: Path, name: str, prompts: Prompts, tokens: int) -> dict[str, list[float]]:
    """Print one row for each temperature. Return the shares by position of each."""
    by_row: dict[str, list[float]] = {}
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature)
        asked = [
            GenerationRequest(prompt, tokens, replace(params, seed=seed))
            for seed, prompt in enumerate(prompts)
        ]
        found = run(path, asked, mtp=str(DEPTH), dtype="float32")
        label = f"T = {temperature}" if temperature else "greedy"
        by_row[f"{name}, {label}"] = by_position(found)
        shares = " | ".join(f"{share:.1%}" for share in by_position(found))
        print(f"| {name} | {label} | {shares} | {tokens_per_window(found):.2f} |", flush=True)
    return by_row


def main() -> None:
    """Print the table and publish the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    parser.add_argument("--model", type=Path, default=checkpoint_dir())
    parser.add_argument("--prompts", type=int, default=28, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="after each prompt")
    options = parser.parse_args()
    tokenizer = Tokenizer.load(options.model)
    held_out = held_out_prompts(tokenizer, options.prompts)
    print(f"{about()}; {options.prompts} prompts of each kind, {options.tokens} tokens each\n")
    positions = " | ".join(f"{i + 1}" for i in range(DEPTH))
    print(f"| text | temperature | {positions} | tokens a window |")
    print("| --- " * (DEPTH + 3) + "|")
    shares = acceptance_rows(options.model, "held out", held_out, options.tokens)
    seen = seen_prompts(tokenizer, options.prompts)
    shares |= acceptance_rows(options.model, "seen", seen, options.tokens)
    publish(
        "acceptance",
        {
            "options": {**vars(options), "model": options.model.name},
            "accepted by position": shares,
        },
        {"drafts kept": lines(range(1, DEPTH + 1), shares, "position", "share of windows")},
    )


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keep the line breaks of the description."""


if __name__ == "__main__":
    main()
