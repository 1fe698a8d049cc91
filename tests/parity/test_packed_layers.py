"""Packed layers around reference kernels: the tokens do not depend on other requests, windows, rollbacks or cuts.

The kernels themselves need a GPU: tests/parity/test_cuda_kernels.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.parts import part_module
from mtp.device import DEVICES
from mtp.layers.cuda.packed_linear import PackedLinear
from mtp.layers.layer import Hole, KVFormat
from mtp.layers.mlx_modules import objects_of, products_in_use
from proto.frame import Admit, Commit, Frame, Op, RestorePrefix, SavePrefix, Segment
from proto.images import ImageSpan
from proto.kernels import Kernels
from proto.params import SamplingParams
from proto.span import Span
from tests.bench.dialled_model import BITS, FULL_BITS, ModelShape
from tests.support.stages.doubled import Doubled
from tests.support.stages.reference_kernels import reference_kernels
from tests.support.stages.rows_behind_a_hole import rows_behind_a_hole
from worker.engine.frame_engine import FrameEngine
from worker.engine.warm_up import warm_up
from worker.model.loader import StageModules
from worker.model.stage import StageForward
from worker.model.verifier import Verifier

pytestmark = pytest.mark.thorough

SHAPE = ModelShape(hidden=256, layers=4, heads=2, kv_heads=1, value_heads=16, mlp=256)
VOCAB = 512
COUNT = 8
"""Tokens of an answer."""

SAMPLED = SamplingParams(temperature=0.9, seed=3)


@pytest.fixture(scope="module", autouse=True)
def _packed() -> Iterator[None]:
    with reference_kernels():
        yield


def modules_of(start: int, end: int, bits: int = BITS) -> StageModules:
    """Return random weights of layers `start … end`, the same ones for every cut."""
    raw = SHAPE.config(bits)
    raw["text_config"] |= {
        "vocab_size": VOCAB,
        "linear_num_key_heads": 8,
        "eos_token_id": VOCAB - 1,
    }
    config = ModelConfig.parse(Path("config.json"), raw)

    def part(name: str, seed: int) -> Any:
        """Return one part, quantized."""
        mx.random.seed(seed)
        holder = nn.Module()
        holder.part = part_module(config, name)
        holder.set_dtype(mx.bfloat16)
        if bits != FULL_BITS:
            nn.quantize(holder, 64, bits)
        mx.eval(holder.parameters())
        return holder.part.eval()

    last = end == SHAPE.layers
    seeds = {f"layers.{i}": 10 + i for i in range(start, end)}
    if start == 0 or last:
        seeds["embed"] = 1
    if last:
        seeds |= {"norm": 2, "lm_head": 3, "mtp": 4}
    parts = {name: part(name, seed) for name, seed in seeds.items()}
    return StageModules.of(config, Span(start, end), parts)


def engines(*cuts: int) -> list[FrameEngine]:
    """Return fresh engines over the layers split at `cuts`."""
    borders = [0, *cuts, SHAPE.layers]
    found = []
    for start, end in pairwise(borders):
        stage = StageForward(modules_of(start, end), KVFormat())
        verifier = Verifier(stage.modules, KVFormat()) if end == SHAPE.layers else None
        found.append(FrameEngine(stage, epoch=1, first=start == 0, verifier=verifier))
    return found


def test_all_products_of_four_bits_are_packed() -> None:
    """Then MLX's own modules, which take minutes to compile, are needed for none. Those of 8 bits need them."""
    stage = StageForward(modules_of(0, SHAPE.layers), KVFormat())
    head: Any = stage.modules.head
    assert type(head.fc) is PackedLinear
    assert not products_in_use(objects_of(stage), stage.dtype, 9)
    eight = StageForward(modules_of(0, SHAPE.layers, bits=8), KVFormat())
    found = products_in_use(objects_of(eight), eight.dtype, 9)
    assert {product.kernel for product in found} == {"qmm_sm80_tn", "qmm_naive_tn_aligned"}


@dataclass
class Answer:
    """A sequence on its way: its verified tokens, and what its next window commits and drafts."""

    seq_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    window: int = 0
    commit: Commit | None = None

    @property
    def admit(self) -> Admit:
        return Admit(self.seq_id, len(self.prompt) + 4 * COUNT, len(self.prompt), self.params)


class Pipeline:
    """Engines in a row, and the number of the next frame."""

    def __init__(self, *cuts: int) -> None:
        self.engines = engines(*cuts)
        self.frames = 0

    def send(self, ops: Sequence[Op], segments: Sequence[Segment]) -> Frame:
        frame = Frame(1, self.frames, tuple(ops), tuple(segments))
        self.frames += 1
        for engine in self.engines:
            frame = engine.process(frame)
        return frame

    def start(self, answer: Answer, ops: Sequence[Op] = (), skipped: int = 0) -> None:
        """Admit `answer` and run its prompt but for `skipped` tokens."""
        chunk = Segment(answer.seq_id, 0, skipped, answer.prompt[skipped:], sample=True)
        (outcome,) = self.send([answer.admit, *ops], [chunk]).outcomes
        assert outcome.token is not None
        answer.tokens.append(outcome.token)

    def step(self, answers: Sequence[Answer], drafts: Sequence[tuple[int, ...]], depth: int) -> None:
        """Run one window of each answer, with these drafts, and ask the head for `depth` drafts."""
        ops: list[Op] = [answer.commit for answer in answers if answer.commit is not None]
        segments = []
        for answer, guess in zip(answers, drafts, strict=True):
            answer.window += 1
            position = len(answer.prompt) + len(answer.tokens) - 1
            window = (answer.tokens[-1], *guess)
            segments.append(Segment(answer.seq_id, answer.window, position, window, open=True, drafts=depth))
        outcomes = self.send(ops, segments).outcomes
        for answer, guess, outcome in zip(answers, drafts, outcomes, strict=True):
            assert outcome.token is not None and len(outcome.drafts) == depth
            accepted = outcome.accepted_length
            answer.tokens += [*guess[: accepted - 1], outcome.token]
            answer.commit = Commit(answer.seq_id, answer.window, accepted)


def fresh(count: int) -> list[Answer]:
    """Return answers to prompts of 1 to 40 tokens, every other one sampled."""
    params = (SamplingParams(), SAMPLED)
    return [
        Answer(i, tuple((7 * i + 3 * j) % VOCAB for j in range(1 + 13 * i % 40)), params[i % 2]) for i in range(count)
    ]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the tokens of each answer alone, computed one token at a time."""
    found = []
    for answer in fresh(10):
        pipeline = Pipeline()
        answer = replace(answer, seq_id=0)
        pipeline.start(answer)
        while len(answer.tokens) < COUNT + 4:
            pipeline.step([answer], [()], depth=0)
        found.append(answer.tokens)
    return found


def test_the_layers_are_packed() -> None:
    """The stage of these tests runs the packed layers, its head and lm_head included."""
    (engine,) = engines()
    modules = engine.stage.modules
    assert engine.stage.variants.summary == "4 packed"
    assert isinstance(modules.lm_head, PackedLinear)
    assert modules.head is not None and modules.head.block.kind == "packed"


@pytest.mark.parametrize("bits", [BITS, FULL_BITS])
@pytest.mark.parametrize("width", [1, 3, pytest.param(40, marks=pytest.mark.slow)])
def test_the_parts_of_the_members_are_added(width: int, bits: int) -> None:
    """A packed layer of a group adds the parts of all members after both of its halves, as the reference does.

    Unquantized weights are fused. Rows of an image rotate by its rows and columns.
    """
    rows = mx.random.normal((width, SHAPE.hidden), key=mx.random.key(width)).astype(mx.bfloat16)
    results = []
    for kernels, shared in ((Kernels.auto, True), (Kernels.mlx, True), (Kernels.mlx, False)):
        stage = StageForward(modules_of(0, SHAPE.layers, bits), KVFormat(), kernels=kernels)
        communicator = Doubled()
        if shared:
            stage.modules.communicator = communicator
            stage.modules.share()
        image = ImageSpan(0, 1, width)
        sequence = stage.new_sequence(Admit(0, 3 * width, width, images=(image,)))
        for window in range(3):
            tokens = (1,) * width
            segment = Segment(0, window, window * width, tokens, open=window > 0)
            y = stage.forward(rows, [(sequence, segment)])
        results.append(y.astype(mx.float32))
        assert not shared or communicator.sums >= 2 * len(stage.modules.layers)
    found, expected, alone = results
    norm = mx.linalg.norm(expected)
    assert (mx.linalg.norm(found - expected) < 0.05 * norm).item()
    assert (mx.linalg.norm(alone - expected) > 0.1 * norm).item()


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("sequences", [1, 9])
def test_a_row_does_not_see_rejected_rows(count: int, sequences: int) -> None:
    """A row behind rejected rows has the place and the result of one behind the accepted rows."""
    (engine,) = engines()
    for found, expected in rows_behind_a_hole(engine.stage.modules.layers[3], count, sequences):
        assert mx.linalg.norm(found - expected) < 0.005 * mx.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(), pytest.param((2,), marks=pytest.mark.slow)], ids=["whole", "cut"])
def test_company_and_drafts_change_no_token(expected: list[list[int]], cuts: tuple[int, ...]) -> None:
    """Ten answers at once, in windows of mixed widths with right and wrong drafts, are those of each alone."""
    pipeline, answers = Pipeline(*cuts), fresh(10)
    for answer in answers:
        pipeline.start(answer)
    turn = 0
    while any(len(answer.tokens) < COUNT for answer in answers):
        turn += 1
        going = [a for a in answers if len(a.tokens) < COUNT]
        drafts = []
        for answer in going:
            right = (answer.seq_id + turn) % 4
            done = len(answer.tokens)
            guess = expected[answer.seq_id][done : done + right]
            wrong = (expected[answer.seq_id][done + len(guess)] + 1) % VOCAB
            drafts.append((*guess, wrong) if turn % 2 else tuple(guess))
        pipeline.step(going, drafts, depth=turn % 3)
    for answer, tokens in zip(answers, expected, strict=True):
        assert answer.tokens[:COUNT] == tokens[:COUNT], answer.seq_id


def test_a_row_moved_back_is_that_of_the_cache_without_the_entries_after_it() -> None:
    """A draft after a rejected window goes before the window's entries, does not see them, and has its own position.

    The next row is moved as far, so the entry of the first must be where the second looks for it.
    """
    (engine,) = engines()
    layer = engine.stage.modules.layers[3]
    rows = mx.random.normal((9, SHAPE.hidden), key=mx.random.key(5)).astype(mx.bfloat16)
    outputs = []
    for rejected in (0, 2):
        caches = [layer.new_cache(KVFormat()) for _ in range(2)]
        layer.forward(rows[:3], caches, [2, 1])
        if rejected:
            layer.forward(rows[3 : 3 + 2 * rejected], caches, [rejected] * 2)
        count = mx.array([rejected], mx.int32)
        holes = [Hole(cache.offset, count, rejected) for cache in caches] if rejected else []
        outputs.append([layer.forward(rows[5:7], caches, [1, 1], holes=holes)])
        outputs[-1].append(layer.forward(rows[7:9], caches, [1, 1], holes=holes))
    for found, wanted in zip(*outputs, strict=True):
        assert mx.array_equal(found, wanted)


def test_a_prefix_copy_continues_as_the_prompt_did() -> None:
    """A prompt that starts from a prefix, saved after a window was cut, gives the token of the whole prompt."""
    pipeline = Pipeline()
    first = Answer(0, (3, 1, 4, 1, 5), SamplingParams())
    pipeline.start(first)
    wrong = tuple((first.tokens[0] + i) % VOCAB for i in (1, 2))
    pipeline.step([first], [wrong], depth=0)
    assert first.commit is not None and first.commit.accepted_length < 3
    text = (*first.prompt, *first.tokens)
    known = len(first.prompt) + first.commit.accepted_length
    pipeline.send([first.commit, SavePrefix(0, 0)], [])
    whole, restored = (Answer(i, (*text[:known], 9, 2), SamplingParams()) for i in (1, 2))
    pipeline.start(whole)
    pipeline.start(restored, [RestorePrefix(2, 0)], skipped=known)
    assert restored.tokens == whole.tokens
    for answer in (whole, restored):
        pipeline.step([answer], [()], depth=2)
    assert restored.tokens == whole.tokens


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "frames"), [("cuda", 31), ("metal", 7), ("cpu", 0)])
def test_the_warm_up_runs_to_its_end(
    backend: str, frames: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First, middle and last stages run all frames of the warm-up, of which each device needs a number of its own."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("worker.engine.warm_up.this_device", lambda: DEVICES[backend])
    monkeypatch.setattr("worker.engine.warm_up.CHUNK", 4)
    for start, end in ((0, 4), (1, 3)):
        stage = StageForward(modules_of(start, end), KVFormat())
        warm_up(stage, first=start == 0, last=end == 4, expect=lambda _: None)
    messages = [record.getMessage() for record in caplog.records]
    done = [vars(r)["done"] for r in caplog.records if r.getMessage() == "compiling kernels"]
    assert done == [f"{frame} of {frames} frames" for frame in range(0, frames, 8)] * 2
    assert messages.count("kernels compiled") == (2 if frames else 0)
    assert "warm-up ended early" not in messages
