"""Real workers behind HTTP give the same answers as `mtp-coord generate`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from tests.cluster.conftest import Pool
from tests.support.processes.processes import WITHOUT_TORCH, serving

TOKENS = 48
PROMPT = "class Queue:\n    def __init__(self, size):\n        self.items = []\n\n    def put(self, item):\n"
SIZES = (0, 2, 3, 8)
"""Workers; without one the coordinator serves alone."""

MODES = ("off", "1", "3", "auto", "filled")

# Every size and every mode is in the fast half, which `make test-all` runs.
FAST = ((0, "1"), (2, "off"), (2, "1"), (3, "filled"), (8, "3"))
CASES = [
    pytest.param(2, "auto", marks=pytest.mark.smoke),
    *FAST,
    *(
        pytest.param(n, mode, marks=pytest.mark.slow)
        for n in SIZES
        for mode in MODES
        if (n, mode) not in {*FAST, (2, "auto")}
    ),
]


@dataclass(frozen=True)
class Answer:
    """The parts of an answer that both commands report."""

    tokens: list[str]
    logprobs: list[float]
    text: str
    reason: str


@dataclass(frozen=True)
class Asked:
    """One request, as flags of `generate` and as fields of a completion."""

    temperature: float
    top_p: float
    seed: int

    @property
    def flags(self) -> list[str]:
        return [f"--temp={self.temperature}", f"--top-p={self.top_p}", f"--seed={self.seed}"]

    @property
    def fields(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}


GREEDY = Asked(temperature=0.0, top_p=1.0, seed=0)
SAMPLED = Asked(temperature=0.9, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint_dir())


@pytest.fixture(scope="module")
def expected(tokenizer: Tokenizer) -> Iterator[dict[Asked, Answer]]:
    """Return the float32 answers of `mtp-coord generate`, in one process and one token at a time."""
    start = f"{WITHOUT_TORCH}; from coordinator.cli import main; main()"
    command = [sys.executable, "-c", start, "generate", "--raw", PROMPT, "--mtp", "off"]
    command += ["--dtype", "float32", "--max-tokens", str(TOKENS), "--logprobs", "0", "--json"]
    with ExitStack() as stack:
        running = {
            asked: stack.enter_context(
                subprocess.Popen([*command, *asked.flags], stdout=subprocess.PIPE)
            )
            for asked in (GREEDY, SAMPLED)
        }
        yield {
            asked: _generated(process.communicate(timeout=100)[0], tokenizer)
            for asked, process in running.items()
        }


def _generated(output: bytes, tokenizer: Tokenizer) -> Answer:
    found = json.loads(output)
    return Answer(
        [tokenizer.token_bytes(token).decode() for token in found["tokens"]],
        [entry["logprob"] for entry in found["logprobs"]],
        found["text"],
        found["finish_reason"],
    )


def completed(url: str, prompt: tuple[int, ...], asked: Asked) -> Answer:
    """Return the answer over HTTP."""
    body = {"prompt": list(prompt), "max_tokens": TOKENS, "logprobs": 0, **asked.fields}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    logprobs = choice["logprobs"]
    return Answer(
        logprobs["tokens"], logprobs["token_logprobs"], choice["text"], choice["finish_reason"]
    )


@pytest.mark.timeout(300)  # as many as eight workers start for the first that wants them
@pytest.mark.parametrize(("workers", "mode"), CASES)
def test_any_number_of_workers_gives_one_answer(
    pool: Pool,
    expected: dict[Asked, Answer],
    tokenizer: Tokenizer,
    tmp_path: Path,
    workers: int,
    mode: str,
) -> None:
    """Any number of workers, with and without MTP, gives the same tokens and log-probabilities."""
    prompt = tokenizer.encode(PROMPT)
    flags = ("--mtp", mode, "--dtype", "float32")
    with serving(tmp_path, "builtin", pool(workers), *flags) as coordinator:
        for asked, answer in expected.items():
            assert completed(coordinator.url, prompt, asked) == answer
        status = httpx.get(f"{coordinator.url}/status", timeout=60).json()
    assert sum(1 for node in status["nodes"] if node["span"]) == max(1, workers), status
    if mode == "filled" and workers < 2:
        assert status["drafted_by_position"] == [], "a single stage has nothing to fill"
    elif mode in ("1", "3", "filled"):
        assert status["accepted_by_position"][0] > 0, "no draft was kept: is --mtp heeded?"
