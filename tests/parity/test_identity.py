"""The built-in model in fp32 gives the same tokens for any drafts, depth, stages and concurrent requests (DESIGN §1).

The CPU backend computes a row the same in any batch, so tokens and log-probabilities must be equal bit for bit.
docs/measurements.md has the differences in other precisions.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence as Row
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from coordinator.drafts.averages import Shape
from coordinator.drafts.controller import Controller, MtpMode
from coordinator.drafts.prompt_lookup import NgramMode
from coordinator.schedule import admission, prefix_cache
from coordinator.schedule.admission import Limits
from coordinator.schedule.request import GenerationEvent, GenerationRequest, PrefillProgress
from coordinator.schedule.sequence import Sequence
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.head.draft_vocabulary import DraftVocabulary, drafted_tokens
from mtp.sampling.sampler import filtered
from proto.params import SamplingParams
from tests.support.checkpoints.checkpoints import convert_checkpoint
from tests.support.stages.local_run import Answered, run
from tests.support.stages.local_run import answer as answer_one
from tests.support.stages.local_stages import local_stages
from tests.support.text.chi_square import chi_square, sigmas
from tests.support.text.prompts import PROMPTS

GREEDY = SamplingParams()
NUCLEUS = SamplingParams(temperature=0.8, top_p=0.95)
PENALTIES = SamplingParams(
    temperature=1.0, min_p=0.05, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2
)
XTC = SamplingParams(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.02, xtc_exempt=(0, 10))
SETTINGS = (GREEDY, NUCLEUS, PENALTIES, XTC)

CHUNK = {1: 512, 2: 32, 4: 7}
"""Prefill chunk by number of stages. The chunk must not matter, so each number of stages has its own."""


def requests(prompts: Row[str], count: int, settings: Row[SamplingParams] = SETTINGS) -> list[GenerationRequest]:
    """Return every prompt in every setting, with one seed a prompt.

    Answers have `count` tokens and ignore stop tokens.
    """
    tokenizer = Tokenizer.load(checkpoint_dir())
    return [
        GenerationRequest(tokenizer.encode(prompt), count, replace(setting, seed=seed, logprobs=2))
        for seed, prompt in enumerate(prompts)
        for setting in settings
    ]


def answers(asked: Row[GenerationRequest], mtp: str, stages: int = 1, **options: Any) -> list[Answered]:
    """Return the built-in model's answers. All requests run concurrently unless `options` say otherwise."""
    limits = Limits(context=2048, prefill_chunk=CHUNK[stages])
    options = {"path": checkpoint_dir(), "dtype": "float32", "limits": limits, **options}
    return run(requests=asked, mtp=mtp, stages=stages, **options)


def check_same(found: Row[Answered], expected: Row[Answered]) -> None:
    """Check that tokens, log-probabilities and finish reasons are equal."""
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.tokens == other.tokens, f"request {i}"
        assert one.logprobs == other.logprobs, f"request {i}"
        assert one.reason == other.reason, f"request {i}"


def accepted(found: Row[Answered]) -> int:
    return sum(answer.stats.accepted for answer in found)


def drafted(found: Row[Answered]) -> int:
    return sum(answer.stats.drafted for answer in found)


# ---- part of the study, for every run of the tests

FEW = (PROMPTS[1], PROMPTS[19])
COUNT = 16


@pytest.fixture(scope="module")
def expected() -> list[Answered]:
    """Return the answers without drafts, on one stage, one request at a time."""
    return answers(requests(FEW, COUNT), "off", one_by_one=True)


@pytest.mark.parametrize(
    ("mtp", "stages"),
    [
        ("2", 2),
        ("filled", 4),
        pytest.param("1", 1, marks=pytest.mark.thorough),
        *(pytest.param(mtp, stages, marks=pytest.mark.slow) for mtp, stages in (("3", 4), ("auto", 1), ("off", 4))),
    ],
)
def test_drafts_stages_and_concurrency_change_nothing(expected: list[Answered], mtp: str, stages: int) -> None:
    """Eight concurrent requests, greedy and sampled, give the answers they give alone without drafts.

    The last case runs one request at a time, so that the pipeline is filled with windows.
    """
    found = answers(requests(FEW, COUNT), mtp, stages, one_by_one=mtp == "filled")
    check_same(found, expected)
    if mtp in ("1", "2", "3", "filled"):
        assert accepted(found) > 0, "no draft was accepted, so the test compared nothing"


@pytest.mark.parametrize(
    ("mtp", "stages"),
    [
        ("3", 2),
        *(
            pytest.param(mtp, n, marks=pytest.mark.slow)
            for mtp in ("1", "3", "auto")
            for n in (1, 2, 4)
            if (mtp, n) != ("3", 2)
        ),
    ],
)
def test_a_trimmed_draft_head_changes_nothing(expected: list[Answered], mtp: str, stages: int) -> None:
    """Answers whose drafts come from a sixth of the tokens are those without drafts. Others are never drafted."""
    tokenizer = Tokenizer.load(checkpoint_dir())
    part = DraftVocabulary(640).resolve(tokenizer.backend, tokenizer.eos_ids, tokenizer.vocab_size)
    found = answers(requests(FEW, COUNT), mtp, stages, draft_vocab=part)
    check_same(found, expected)
    assert mtp == "auto" or accepted(found) > 0, "no draft was accepted, so the test compared nothing"
    outside = set(range(tokenizer.vocab_size)) - set(drafted_tokens(part, tokenizer.vocab_size))
    assert outside & {token for answer in found for token in answer.tokens}
    assert not outside & {token for answer in found for token in answer.accepted}


@pytest.mark.parametrize(
    ("mtp", "stages"),
    [
        ("2", 1),
        pytest.param("off", 2, marks=pytest.mark.thorough),
        pytest.param("filled", 4, marks=pytest.mark.slow),
    ],
)
def test_drafts_from_the_text_change_nothing(mtp: str, stages: int) -> None:
    """Prompts that repeat themselves have matches, and the answers are those without them."""
    repeated = [f"{prompt} {prompt}" for prompt in FEW[:1]]
    asked = requests(repeated, COUNT, SETTINGS[:3])  # among more answers, drafts from the text do not pay
    plain = answers(asked, "off", one_by_one=True)
    found = answers(asked, mtp, stages, one_by_one=mtp == "filled", ngrams=True)
    check_same(found, plain)
    assert accepted(found) > 0, "no draft was accepted, so the test compared nothing"


class RandomDepth(Controller):
    """A controller that draws a random depth for every micro-batch and records it."""

    def __init__(self, mode: MtpMode, ngram: NgramMode) -> None:
        super().__init__(mode, ngram=ngram)
        self.chance = random.Random(7)

    def choose_shape(self, sequences: int = 1, fill: int = 1) -> Shape:
        shape = Shape(1 + self.chance.randrange(5))
        DEPTHS.append(shape.depth)
        return shape


DEPTHS: list[int] = []


@pytest.mark.parametrize(
    ("mtp", "stages", "saved"),
    [("off", 1, True), ("2", 2, True), pytest.param("1", 1, False, marks=pytest.mark.thorough)],
)
def test_pauses_change_nothing(
    expected: list[Answered], mtp: str, stages: int, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clients that take two places from each other all the time get the answers that they get alone."""
    pauses = Counter[int]()
    pause = Sequence.pause

    def counted(sequence: Sequence) -> None:
        pauses[sequence.seq_id] += 1
        pause(sequence)

    monkeypatch.setattr(Sequence, "pause", counted)
    monkeypatch.setattr(admission, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(prefix_cache, "SMALLEST_ENTRY", 8)
    asked = [replace(one, client=str(i % 3)) for i, one in enumerate(requests(FEW, COUNT))]
    check_same(answers(asked, mtp, stages, max_sequences=2, prefix_cache=saved), expected)
    assert len(pauses) > 2 and pauses.total() > 6, pauses


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_prompt_that_was_left_changes_nothing(stages: int) -> None:
    """A client that leaves again and again while its prompt is computed gets the answer of one that stays."""
    (asked,) = requests([" ".join(PROMPTS[:20])], 4, SETTINGS[1:2])
    (expected,) = answers([asked], "off", prefix_cache=False)

    async def work() -> tuple[Answered, int]:
        limits = Limits(context=2048, prefill_chunk=64, step_tokens=64)
        checkpoint = Checkpoint.open(checkpoint_dir())
        async with local_stages(checkpoint, stages=stages, dtype="float32", limits=limits) as loop:
            for chunks in (3, 1):
                done = asyncio.Event()

                def deliver(event: GenerationEvent, most: int = 64 * chunks, done: asyncio.Event = done) -> None:
                    if isinstance(event, PrefillProgress) and event.done >= event.cached + most:
                        done.set()

                cancel = loop.submit(asked, deliver)
                await done.wait()
                cancel()
            found = await answer_one(loop, asked)
            return found, found.stats.cached_tokens

    found, cached = asyncio.run(work())
    check_same([found], [expected])
    assert cached >= 192


def sixteen() -> list[GenerationRequest]:
    """Return prompts of 1 to 180 tokens, answers of 1 to 12, and every kind of sampling."""
    tokenizer = Tokenizer.load(checkpoint_dir())
    long = tokenizer.encode(" ".join(PROMPTS[13:]))
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS[:13]]
    prompts += [long[:1], long[:180], long[90:200]]
    biased = SamplingParams(temperature=0.9, top_k=20, logit_bias={17: 3.0})
    settings = (*SETTINGS, biased)
    return [
        GenerationRequest(prompt, 1 + 7 * i % 12, replace(settings[i % len(settings)], seed=i, logprobs=3))
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.slow
def test_sixteen_at_once_with_mixed_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer equals the answer alone when micro-batches of random depths run together."""
    asked = sixteen()
    expected = answers(asked, "off", one_by_one=True)
    monkeypatch.setattr("tests.support.stages.local_stages.Controller", RandomDepth)
    DEPTHS.clear()
    found = answers(asked, "4", stages=2)
    check_same(found, expected)
    assert len(set(DEPTHS)) >= 3
    assert accepted(found) > 0
    assert max(len(answer.stats.drafted_by_position) for answer in found) >= 3


@pytest.mark.thorough
def test_seeds_differ() -> None:
    """The same prompt under another seed gives another answer."""
    (asked,) = requests(FEW[:1], COUNT, [NUCLEUS])
    others = [replace(asked, params=replace(asked.params, seed=seed)) for seed in range(3)]
    found = answers(others, "2")
    assert len({answer.tokens for answer in found}) == 3


@pytest.mark.slow
def test_penalties_see_the_drafts_before_them() -> None:
    """A window's penalties include the drafts before each row. The penalties here reward recent tokens to show it."""
    echo = SamplingParams(temperature=1.0, presence_penalty=-1.5, frequency_penalty=0.2)
    asked = requests(FEW, COUNT, [echo, replace(echo, temperature=0.0)])
    found = answers(asked, "3")
    check_same(found, answers(asked, "off"))
    assert accepted(found) > 0


@pytest.mark.thorough
def test_a_stop_token_inside_a_kept_window_ends_the_text(expected: list[Answered]) -> None:
    """The first stop token ends the text wherever it falls, also between accepted drafts."""
    (asked,) = requests(FEW[:1], COUNT, [GREEDY])
    whole = expected[0].tokens
    cases = [(stop, whole.index(stop)) for stop in list(dict.fromkeys(whole))[::2]]
    stopped = [replace(asked, stop_tokens=frozenset({stop})) for stop, _ in cases]
    for answer, (_, end) in zip(answers(stopped, "3"), cases, strict=True):
        assert (answer.tokens, answer.reason) == (whole[:end], "stop")
        assert answer.stats.completion_tokens == end
        assert answer.stats.accepted <= end


@pytest.mark.slow
@pytest.mark.parametrize(("weight_bits", "kv_bits"), [(None, 8), (None, 4), (4, None)])
def test_a_quantization_changes_nothing_more(
    tmp_path: Path, weight_bits: Literal[4] | None, kv_bits: int | None
) -> None:
    """With quantized weights or K/V, the answer does not depend on drafts, stages or concurrent requests.

    The quantization itself may change the answer. Activations are fp32.
    """
    path = checkpoint_dir()
    if weight_bits is not None:
        path = convert_checkpoint(path, tmp_path, quantize=weight_bits)
    asked = requests(FEW[:1], COUNT)
    plain = answers(asked, "off", path=path, kv_bits=kv_bits, one_by_one=True)
    found = answers(asked, "2", stages=2, path=path, kv_bits=kv_bits)
    check_same(found, plain)
    assert accepted(found) > 0


# ---- the ratio rule


def distribution(
    prompt: tuple[int, ...], params: SamplingParams, length: int, stop: int
) -> dict[tuple[int, ...], float]:
    """Return the chances of all answers of up to `length` tokens before `stop`, from mlx-lm's own model."""
    model, _ = load_model(checkpoint_dir())
    model.set_dtype(mx.float32)
    found: dict[tuple[int, ...], float] = {}
    open_texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in open_texts.items():
            scores = filtered(model(mx.array([[*prompt, *text]]))[0, -1:].astype(mx.float32), params)
            for token, share in enumerate(np.array(mx.softmax(scores[0]), np.float64)):
                ends = token == stop
                if share:
                    (found if ends else longer)[text if ends else (*text, token)] = chance * share
        open_texts = longer
    return found | open_texts


@pytest.mark.parametrize(
    ("mtp", "stages", "ngrams"),
    [
        pytest.param("2", 1, False, marks=pytest.mark.thorough),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("1", 1, True), ("filled", 4, False))),
    ],
)
def test_answers_under_the_ratio_rule_follow_the_model(mtp: str, stages: int, ngrams: bool) -> None:
    """The answers of 200 seeds are distributed as the model's: chi-square stays below 4 sigmas.

    The stop token is likely, so it is often a draft. The same seeds give the same answers again.
    """
    params = SamplingParams(temperature=1.2, top_k=3, acceptance="ratio")
    prompt = Tokenizer.load(checkpoint_dir()).encode(PROMPTS[1])[:6] * (2 if ngrams else 1)
    plain = distribution(prompt, params, 2, stop=-1)
    stop = max(plain, key=plain.__getitem__)[1]
    expected = distribution(prompt, params, 3, stop)
    asked = [
        GenerationRequest(prompt, 3, replace(params, seed=seed), stop_tokens=frozenset({stop})) for seed in range(200)
    ]
    parts = [asked[i : i + 100] for i in range(0, 200, 100)]  # what the queue takes of one client
    found = [one for part in parts for one in answers(part, mtp, stages, ngrams=ngrams, one_by_one=mtp == "filled")]
    counts = Counter(answer.tokens for answer in found)
    assert set(counts) <= set(expected)
    likely = [text for text, chance in expected.items() if 200 * chance >= 5]
    rest = 1 - sum(expected[text] for text in likely), 200 - sum(counts[text] for text in likely)
    statistic = chi_square([*(counts[t] for t in likely), rest[1]], [*(expected[t] for t in likely), rest[0]])
    assert sigmas(statistic, len(likely)) < 4
    again = answers(asked[:9], mtp, stages, ngrams=ngrams, one_by_one=mtp == "filled")
    assert [answer.tokens for answer in again] == [answer.tokens for answer in found[:9]]
    assert 0 < accepted(found) < drafted(found)


# ---- the whole study


@pytest.fixture(scope="module")
def all_expected() -> list[Answered]:
    """Return the answers to 20 prompts in 4 settings, 200 tokens each, without drafts on one stage."""
    return answers(requests(PROMPTS, 200), "off")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("mtp", "stages"),
    [
        *((mtp, n) for mtp in ("off", "1", "2", "3") for n in (1, 2, 4) if (mtp, n) != ("off", 1)),
        *(("filled", n) for n in (2, 4)),
    ],
)
def test_all_answers_are_one(all_expected: list[Answered], mtp: str, stages: int) -> None:
    """MTP off and depths 1 to 3, on 1, 2 and 4 stages, give the tokens of MTP off on one stage.

    So does one request at a time with a window in flight for every stage. At least half of the drafts are accepted, so
    errors of verification would show.
    """
    found = answers(requests(PROMPTS, 200), mtp, stages, one_by_one=mtp == "filled")
    check_same(found, all_expected)
    assert mtp == "off" or accepted(found) > drafted(found) / 2
