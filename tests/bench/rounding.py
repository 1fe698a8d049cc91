"""The effect of rounding: the same text in several precisions, with and without drafts.

    python -m tests.bench.rounding

In exact arithmetic a row of logits is the same alone and in a window. A matmul that rounds differently for other
numbers of rows breaks that. Where two tokens are nearly as likely, the answer may then differ from the one without
drafts. The table counts these answers for each precision, and after how many tokens they differ. A last column counts
the answers that differ from the fp32 answer without drafts, which is the effect of the precision itself.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from coordinator.generation.request import GenerationRequest
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from proto.params import SamplingParams
from tests.bench.machine import about
from tests.bench.report import bars, publish
from tests.bench.texts import held_out_prompts
from tests.support.checkpoints.checkpoints import convert_checkpoint
from tests.support.stages.local_run import run

DEPTHS = ("1", "2", "3")
SETTINGS = (SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95))
TOGETHER = "off, batched"
"""Concurrent requests. A batch changes the number of rows as drafts do."""

Answers = list[tuple[int, ...]]


@dataclass(frozen=True)
class Precision:
    """A checkpoint and the dtype it is computed with."""

    name: str
    path: Path
    dtype: mx.Dtype
    kv_bits: int | None = None


def precisions(folder: Path) -> list[Precision]:
    """Return the built-in model as it is, and converted into `folder`."""
    raw = checkpoint_dir()
    four = convert_checkpoint(raw, folder / "4bit", quantize=4)
    eight = convert_checkpoint(raw, folder / "8bit", quantize=8)
    return [
        Precision("fp32", raw, mx.float32),
        Precision("bf16", raw, mx.bfloat16),
        Precision("fp16", raw, mx.float16),
        Precision("8-bit weights, fp32", eight, mx.float32),
        Precision("4-bit weights, fp32", four, mx.float32),
        Precision("4-bit weights, bf16", four, mx.bfloat16),
        Precision("fp32, 8-bit K/V", raw, mx.float32, kv_bits=8),
        Precision("fp32, 4-bit K/V", raw, mx.float32, kv_bits=4),
    ]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the number of tokens that two answers share before they differ, or None if they are equal."""
    pairs = zip(one, other, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def differences(found: Answers, expected: Answers) -> list[int]:
    """Return, for the answers that differ, the number of shared tokens in ascending order."""
    places = [first_difference(a, b) for a, b in zip(found, expected, strict=True)]
    return sorted(place for place in places if place is not None)


def difference_text(places: Sequence[int], answers: int) -> str:
    """Return text such as `7 of 40, after 12 / 55`: how many differ, and the earliest and median position."""
    if not places:
        return f"0 of {answers}"
    return f"{len(places)} of {answers}, after {places[0]} / {statistics.median(places):.0f}"


def answers(
    precision: Precision, asked: Sequence[GenerationRequest], mtp: str, *, one_by_one: bool = True
) -> Answers:
    """Return the answers of one precision."""
    found = run(
        precision.path,
        asked,
        mtp=mtp,
        dtype=precision.dtype,
        kv_bits=precision.kv_bits,
        one_by_one=one_by_one,
    )
    return [answer.tokens for answer in found]


def main() -> None:
    """Print the table and publish its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    parser.add_argument("--prompts", type=int, default=10, help="each greedy and sampled")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--only", default="", help="only precisions whose name contains this text")
    options = parser.parse_args()
    tokenizer = Tokenizer.load(checkpoint_dir())
    asked = [
        GenerationRequest(prompt, options.tokens, replace(setting, seed=seed))
        for seed, prompt in enumerate(held_out_prompts(tokenizer, options.prompts))
        for setting in SETTINGS
    ]
    print(f"{about()}; {len(asked)} answers of {options.tokens} tokens each\n")
    columns = [*(f"depth {depth}" for depth in DEPTHS), TOGETHER, "the precision itself"]
    print(f"| | {' | '.join(columns)} |\n{'| --- ' * (len(columns) + 1)}|")
    exact: Answers | None = None
    found: dict[str, dict[str, list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for precision in precisions(Path(folder)):
            if exact is not None and options.only not in precision.name:
                continue
            plain = answers(precision, asked, "off")
            exact = exact or plain
            others = [(answers(precision, asked, depth), plain) for depth in DEPTHS]
            others.append((answers(precision, asked, "off", one_by_one=False), plain))
            others.append((plain, exact))
            places = [differences(*pair) for pair in others]
            found[precision.name] = dict(zip(columns, places, strict=True))
            cells = [difference_text(each, len(asked)) for each in places]
            print(f"| {precision.name} | {' | '.join(cells)} |", flush=True)
    shares = {
        column: bars({name: len(each[column]) for name, each in found.items()}, "answers that part")
        for column in columns
    }
    publish("rounding", {"options": vars(options), "places": found}, shares)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keep the line break of the example."""


if __name__ == "__main__":
    main()
