"""Real workers behind HTTP give the same answers as one process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.drafts.controller import MtpMode
from coordinator.schedule.local_generator import local_generator
from coordinator.schedule.request import Finished, GenerationRequest, TokenChunk, generate
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.frame import TokenLogprob
from proto.params import SamplingParams
from proto.stage_options import StageOptions
from tests.cluster.conftest import Pool
from tests.support.processes.processes import serving

TOKENS = 32
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
    """The parts of an answer that are compared."""

    tokens: list[str]
    logprobs: list[float]
    text: str
    reason: str


@dataclass(frozen=True)
class Asked:
    """The sampling of one request."""

    temperature: float
    top_p: float
    seed: int

    @property
    def fields(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}


GREEDY = Asked(temperature=0.0, top_p=1.0, seed=0)
SAMPLED = Asked(temperature=0.9, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint_dir())


@pytest.fixture(scope="module")
def expected(tokenizer: Tokenizer) -> dict[Asked, Answer]:
    """Return the float32 answers of a generator in this process, one token at a time."""
    return asyncio.run(_generated(tokenizer))


async def _generated(tokenizer: Tokenizer) -> dict[Asked, Answer]:
    prompt, found = tokenizer.encode(PROMPT), {}
    checkpoint = Checkpoint.open(checkpoint_dir())
    async with local_generator(checkpoint, options=StageOptions("float32"), mtp=MtpMode(0)) as loop:
        for asked in (GREEDY, SAMPLED):
            params = SamplingParams(**asked.fields, logprobs=0)
            request = GenerationRequest(prompt, TOKENS, params, stop_tokens=tokenizer.eos_ids)
            entries: list[TokenLogprob] = []
            reason = ""
            async for event in generate(loop, request):
                if isinstance(event, TokenChunk):
                    entries += event.logprobs
                elif isinstance(event, Finished):
                    reason = event.reason
            texts = [tokenizer.token_bytes(entry.token).decode() for entry in entries]
            found[asked] = Answer(texts, [one.logprob for one in entries], "".join(texts), reason)
    return found


def completed(url: str, prompt: tuple[int, ...], asked: Asked) -> Answer:
    """Return the answer over HTTP."""
    body = {"prompt": list(prompt), "max_tokens": TOKENS, "logprobs": 0, **asked.fields}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    logprobs = choice["logprobs"]
    return Answer(logprobs["tokens"], logprobs["token_logprobs"], choice["text"], choice["finish_reason"])


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
