"""Grammar libraries side by side, and the gain of drafts that a grammar forces.

    python -m tests.bench.grammars [--vocabulary 100000] [--rounds 5]

The first part compares llguidance with xgrammar and outlines-core, where they are installed, on the same tokens: the
time to compile a schema, the time of a mask along the same texts, and the instances that each schema accepts wrongly or
refuses wrongly. The second part measures tokens per second on answers with a JSON schema, with forced drafts and
without, in alternation. It ends with a table in Markdown and writes build/bench/grammars.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from coordinator.generation.request import GenerationRequest
from coordinator.text.output_format import GrammarCompiler, OutputFormat
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from mtp.head import drafter
from proto.params import SamplingParams
from tests.bench.grammar_cases import CASES, REPORT, SCHEMAS
from tests.bench.grammar_libraries import LIBRARIES, Library
from tests.bench.report import bars, publish
from tests.support.stages.local_run import run

PROMPTS = ("Weather as JSON:\n", "import os\n", "The report: ")


@dataclass(frozen=True)
class LibraryFigures:
    """The figures of one library. Times are in milliseconds; `wrong` counts instances."""

    compile_ms: dict[str, float | None]
    mask_ms: float
    mask_p99_ms: float
    wrongly_accepted: list[str]
    wrongly_refused: list[str]
    unsupported: list[str]


def vocabulary_of(size: int) -> tuple[list[bytes], int]:
    """Return the built-in model's tokens, extended by pairs of them up to `size`, and the id of the end token."""
    tokenizer = Tokenizer.load(checkpoint_dir(), (4089,))
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    end = min(tokenizer.eos_ids)
    known, plain = set(tokens), [t for i, t in enumerate(tokens) if i not in tokenizer.control_ids]
    source = random.Random(0)
    while len(tokens) < size:
        pair = source.choice(plain) + source.choice(plain)
        if len(pair) < 24 and pair not in known:
            known.add(pair)
            tokens.append(pair)
    return tokens, end


def encode(tokens: Sequence[bytes], text: bytes) -> list[int]:
    """Return the tokens of `text`, the longest at each place."""
    ids = {token: i for i, token in reversed([*enumerate(tokens)])}
    longest = max(map(len, tokens))
    found, start = [], 0
    while start < len(text):
        end = next(
            e for e in range(min(len(text), start + longest), start, -1) if text[start:e] in ids
        )
        found.append(ids[text[start:end]])
        start = end
    return found


def measure(library: Library, tokens: Sequence[bytes]) -> LibraryFigures:
    """Return the figures of one library over all schemas and instances."""
    compile_ms: dict[str, float | None] = {}
    for name, schema in SCHEMAS.items():
        try:
            compile_ms[name] = 1e3 * timed(lambda: library.matcher(schema).mask())  # noqa: B023
        except Exception:  # each library has exceptions of its own
            compile_ms[name] = None
    masks: list[float] = []
    wrong: dict[bool, list[str]] = {True: [], False: []}
    unsupported = []
    for case in CASES:
        for instance, valid in case.instances:
            name = f"{case.name}: {json.dumps(instance)}"
            try:
                matcher = library.matcher(case.schema)
            except Exception:  # as above
                unsupported.append(case.name)
                break
            text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False).encode()
            accepted = True
            for token in encode(tokens, text):
                masks.append(timed(matcher.mask))
                accepted = matcher.advance(token)
                if not accepted:
                    break
            if (accepted and matcher.may_end()) != valid:
                wrong[not valid].append(name)
    masks = [1e3 * seconds for seconds in masks] or [0.0]
    p99 = statistics.quantiles(masks, n=100)[98] if len(masks) > 1 else masks[0]
    return LibraryFigures(
        compile_ms, statistics.mean(masks), p99, wrong[True], wrong[False], sorted(set(unsupported))
    )


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that `action` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def compare_libraries(size: int) -> dict[str, LibraryFigures]:
    """Measure every installed library, and print a table."""
    tokens, end = vocabulary_of(size)
    found: dict[str, LibraryFigures] = {}
    for name, make in LIBRARIES.items():
        started = time.perf_counter()
        try:
            library = make(tokens, end)
        except ImportError:
            print(f"{name}: not installed")
            continue
        print(
            f"{name}: vocabulary of {len(tokens)} tokens prepared in {time.perf_counter() - started:.2f} s"
        )
        found[name] = measure(library, tokens)
        for title, cases in (
            ("accepted wrongly", found[name].wrongly_accepted),
            ("refused wrongly", found[name].wrongly_refused),
            ("not supported", found[name].unsupported),
        ):
            if cases:
                print(f"  {title}: {'; '.join(cases)}")
    print(
        f"\n| library | {' | '.join(f'compile {name}, ms' for name in SCHEMAS)} | mask mean / p99, ms | wrong |"
    )
    print("| --- " * (len(SCHEMAS) + 3) + "|")
    for name, figures in found.items():
        times = [
            "refused" if value is None else f"{value:.1f}" for value in figures.compile_ms.values()
        ]
        wrong = len(figures.wrongly_accepted) + len(figures.wrongly_refused)
        masks = f"{figures.mask_ms:.3f} / {figures.mask_p99_ms:.3f}"
        print(
            f"| {name} | {' | '.join(times)} | {masks} | {wrong} of {sum(len(c.instances) for c in CASES)} |"
        )
    return found


def jump_forward(rounds: int) -> dict[str, Any]:
    """Measure tokens per second with forced drafts and without, in alternation. Return medians of the ratios.

    The seconds are CPU time, because MLX's CPU backend has one thread and a machine in use stretches the real time.
    """
    tokenizer = Tokenizer.load(checkpoint_dir(), (4089,))
    compiler = GrammarCompiler(tokenizer)
    grammar = compiler.compile(OutputFormat("json_schema", REPORT, "schema"))
    asked = [
        GenerationRequest(
            tokenizer.encode(prompt),
            120,
            SamplingParams(temperature=temperature, seed=seed, grammar=grammar),
            tokenizer.eos_ids,
        )
        for seed, prompt in enumerate(PROMPTS)
        for temperature in (0.0, 0.8)
    ]
    results: dict[str, Any] = {}
    for mtp in ("1", "2", "3"):
        ratios, windows = [], {}
        for number in range(rounds):
            seconds = {}
            for forced in (True, False) if number % 2 else (False, True):
                started = time.process_time()
                with nullcontext() if forced else patch.object(drafter.DraftJob, "forced", ()):
                    answers = run(
                        checkpoint_dir(),
                        asked,
                        mtp=mtp,
                        dtype=mx.float32,
                        vocabulary=compiler.vocabulary,
                    )
                seconds[forced] = time.process_time() - started
                windows[forced] = sum(answer.stats.windows for answer in answers)
            ratios.append(seconds[False] / seconds[True])
        results[mtp] = {
            "speed": statistics.median(ratios),
            "windows": windows[True] / windows[False],
            "ratios": ratios,
        }
        print(
            f"--mtp {mtp}: tokens/s with forced drafts over without {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}), windows {windows[True] / windows[False]:.2f}"
        )
    return results


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--vocabulary", type=int, default=100_000, help="tokens; 0 for no comparison"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of forced drafts; 0 for none")
    options = parser.parse_args()
    libraries = compare_libraries(options.vocabulary) if options.vocabulary else {}
    jumps = jump_forward(options.rounds) if options.rounds else {}
    publish(
        "grammars",
        {"libraries": {name: vars(each) for name, each in libraries.items()}, "forced": jumps},
        {
            "mask": bars({name: each.mask_ms for name, each in libraries.items()}, "ms"),
            "forced drafts": bars({f"--mtp {m}": j["speed"] for m, j in jumps.items()}, "x"),
        },
    )


if __name__ == "__main__":
    main()
