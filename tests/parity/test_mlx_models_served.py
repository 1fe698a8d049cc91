"""Models of mlx-lm as they are served: the tokens of mlx-lm over stages, drafts, prefixes, backups and recoveries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.drafts.controller import MtpMode
from coordinator.planning.groups import Parallel
from coordinator.schedule.admission import Limits
from coordinator.schedule.request import GenerationRequest
from coordinator.serve.options import ServeOptions
from coordinator.serve.served_parts import OpenedModel
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.head.draft_vocabulary import DraftVocabulary
from proto.errors import UsageError
from proto.params import SamplingParams
from tests.bench.exactness import answers_together
from tests.support.checkpoints.mlx_models import VOCABULARY, greedy_tokens, write_mlx_model
from tests.support.stages.eager_matches import EagerMatches
from tests.support.stages.local_run import Answered, run
from tests.support.stages.local_stages import local_stages

TYPES = (
    "llama", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3", "lfm2", "mamba2", "gemma3_text", "nemotron_h", "jamba",
)  # fmt: skip
"""Dense ones, experts, latents, sliding windows, sinks, recurrent states and mixtures of them."""

USUAL = ("gpt_oss", "nemotron_h")
"""The types that every run of the tests has."""

MARKS = {"deepseek_v3": pytest.mark.thorough, "mamba2": pytest.mark.thorough, "gemma3_text": pytest.mark.slow}
"""The marks of others. All that are not here are slow."""


@pytest.fixture(
    scope="module",
    params=[t if t in USUAL else pytest.param(t, marks=MARKS.get(t, pytest.mark.slow)) for t in TYPES],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model of each type."""
    return write_mlx_model(request.param, tmp_path_factory.mktemp("model") / str(request.param))


def requests(count: int, lengths: Sequence[int], *, sampled: bool) -> list[GenerationRequest]:
    """Return requests of `count` tokens whose prompts repeat themselves, so that their text makes drafts."""
    chance, found = random.Random(5), []
    for seed, length in enumerate(lengths):
        words = [chance.randrange(VOCABULARY) for _ in range(length // 2)]
        params = SamplingParams(temperature=0.8 if sampled else 0.0, seed=seed)
        found.append(GenerationRequest((*words, *words), count, params))
    return found


def texts(answers: Sequence[Answered]) -> list[tuple[int, ...]]:
    """Return the tokens of each answer."""
    return [answer.tokens for answer in answers]


OPTIONS: dict[str, Any] = {"dtype": "float32", "limits": Limits(context=1024, prefill_chunk=16)}


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_greedy_tokens_are_those_of_mlx_lm(model: Path, stages: int) -> None:
    """Prompts in chunks, three sequences at once, and drafts from the text, most of which are rejected."""
    asked = requests(60, (20, 46, 33), sampled=False)
    found = run(model, asked, stages=stages, ngrams=True, **OPTIONS)
    assert texts(found) == [greedy_tokens(model, one.prompt, 60) for one in asked]
    drafted, accepted = (sum(getattr(answer.stats, name) for answer in found) for name in ("drafted", "accepted"))
    assert drafted > accepted or model.name in ("lfm2", "jamba")  # whose texts do not repeat themselves


def test_a_prefix_and_a_disk_change_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are asked again, in memory and after a restart over another cut, have the same answers."""
    monkeypatch.setattr("worker.engine.prefix_disk.CLOSE_SECONDS", 30.0)
    asked = requests(8, (200, 170), sampled=False)
    expected = [greedy_tokens(model, one.prompt, 8) for one in asked]
    for stages in (2, 1, 4):
        options = {**OPTIONS, "state": tmp_path, "prefix_disk": 2**28, "one_by_one": True, "stages": stages}
        found = run(model, [*asked, *asked], **options)
        assert texts(found) == [*expected, *expected]
        assert sum(answer.stats.cached_tokens for answer in found[2:]) > 0
    assert sum(answer.stats.cached_tokens for answer in found[:2]) > 0


def answers(path: Path, asked: Sequence[GenerationRequest], stages: int, *, ngrams: bool, kills: int) -> list[Answered]:
    """Return the answers to all requests, up to eight at once, while the pipeline fails."""

    async def main() -> list[Answered]:
        async with local_stages(Checkpoint.open(path), mtp=MtpMode(0), stages=stages, **OPTIONS) as loop:
            if ngrams:
                loop.scheduler.controller = EagerMatches(MtpMode(0))
            found = await answers_together(loop, asked, 8, kills)
            assert loop.recoveries == kills
            return found

    return asyncio.run(main())


def test_recoveries_change_no_token(model: Path) -> None:
    """Greedy and sampled answers over two stages that fail twice are those of one stage that does not."""
    asked = [*requests(30, (24, 40, 56), sampled=True), *requests(30, (18, 34), sampled=False)]
    expected = run(model, asked, **OPTIONS)
    assert texts(answers(model, asked, 2, ngrams=True, kills=2)) == texts(expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_thousand_tokens_of_each_type(model: Path) -> None:
    """Six runs of ten types are 50,000 tokens and more, with two failures each."""
    lengths = [20 + 6 * i for i in range(12)]
    greedy, sampled = requests(40, lengths, sampled=False), requests(40, lengths, sampled=True)
    own = [greedy_tokens(model, one.prompt, 40) for one in greedy]
    undisturbed = texts(run(model, sampled, **OPTIONS))
    for stages in (1, 2, 4):
        for ngrams in (False, True):
            found = texts(answers(model, [*greedy, *sampled], stages, ngrams=ngrams, kills=2))
            assert found == [*own, *undisturbed]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exact": True, "nodes": 1}, "--exact is not supported for llama"),
        ({"exact": True, "nodes": 2, "parallel": Parallel.parse("tensor")}, "--exact is not supported for llama"),
        ({"nodes": 2, "parallel": Parallel.parse("tensor")}, "--parallel tensor is not supported for llama"),
        ({"parallel": Parallel.parse("1x2")}, "--parallel 1x2 is not supported for llama"),
        ({"kv_bits": 8}, "--kv-bits is not supported for llama"),
        ({"draft_vocab": DraftVocabulary(auto=True)}, "--draft-vocab .* which this checkpoint lacks"),
        ({"mtp": MtpMode(1)}, "--mtp 1: .*head"),
    ],
)
def test_options_that_a_model_lacks(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    """They are refused by name when the model's files are opened."""
    path = write_mlx_model("llama", tmp_path / "llama")
    with pytest.raises(UsageError, match=words):
        OpenedModel(ServeOptions(str(path), **options), path)
