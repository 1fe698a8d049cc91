"""A stage that runs ahead: a frame begins with the token that the frame before it has not delivered yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from coordinator.drafts.controller import MtpMode
from coordinator.schedule.admission import Limits
from coordinator.schedule.request import GenerationRequest
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.device import this_device
from proto.errors import ProtocolError
from proto.frame import Admit, Commit, Evict, Frame, Op, RestorePrefix, SavePrefix, Segment
from proto.frame_stamps import FrameStamps, StageStep
from proto.params import SamplingParams
from tests.conftest import Checkpoints
from tests.support.stages.chain import EPOCH, Chain, random_tokens
from tests.support.stages.local_run import Answered, answer
from tests.support.stages.local_stages import local_stages
from worker.engine import frame_engine
from worker.engine.frame_engine import BegunFrame, FrameEngine, may_overlap
from worker.engine.host import EngineHost

PROMPT = random_tokens(9)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=4)


class Plain:
    """One plain sequence on one stage, whose frames begin and finish separately."""

    def __init__(self, path: Path, params: SamplingParams) -> None:
        self.chain = Chain(path)
        self.engine = self.chain.engines[0]
        self.tokens: list[int] = []
        chunk = Segment(0, 0, 0, tuple(PROMPT), sample=True)
        self.finish(self.begin([Admit(0, 64, len(PROMPT), params)], [chunk]))

    def begin(self, ops: Sequence[Op], segments: Sequence[Segment]) -> BegunFrame:
        """Begin the next frame."""
        frame = Frame(EPOCH, self.engine.frames_done, tuple(ops), tuple(segments))
        return self.engine.begin_frame(frame, FrameStamps(0, StageStep))

    def finish(self, begun: BegunFrame) -> None:
        """Finish a frame and add its token."""
        for outcome in begun.finish_frame().outcomes:
            assert outcome.token is not None
            self.tokens.append(outcome.token)
        begun.clean_up()

    def window(self, number: int, *, ahead: bool) -> Segment:
        """Return the window with a number, which continues the one before it if `ahead`."""
        tokens = () if ahead else (self.tokens[number - 1],)
        position = len(PROMPT) + number - 1
        return Segment(0, number, position, tokens, open=True, sample=True, continues=ahead)

    def commit(self, window: int) -> list[Op]:
        """Return the commit of a whole window, none before the first."""
        return [Commit(0, window, 1)] if window else []


def in_turn(path: Path, params: SamplingParams, count: int) -> Plain:
    """Return a sequence after `count` windows, each sent after the one before it has returned."""
    plain = Plain(path, params)
    for number in range(1, count + 1):
        window = plain.window(number, ahead=False)
        plain.finish(plain.begin(plain.commit(number - 1), [window]))
    return plain


def ahead(path: Path, params: SamplingParams, count: int) -> tuple[Plain, BegunFrame]:
    """Return a sequence after `count` windows, each begun before the one before it is finished, and the last one."""
    plain = Plain(path, params)
    begun = plain.begin([], [plain.window(1, ahead=False)])
    for number in range(2, count + 1):
        following = plain.begin(plain.commit(number - 2), [plain.window(number, ahead=True)])
        plain.finish(begun)
        begun = following
    return plain, begun


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_a_stage_that_runs_ahead_chooses_the_same_tokens(checkpoints: Checkpoints, params: SamplingParams) -> None:
    """Tokens, layers and head state are those of frames that wait for each other."""
    path = checkpoints(layers=4)
    plain, begun = ahead(path, params, 12)
    plain.finish(begun)
    expected = in_turn(path, params, 12)
    assert plain.tokens == expected.tokens
    plain.finish(plain.begin(plain.commit(12), []))
    expected.finish(expected.begin(expected.commit(12), []))
    states = [one.chain.verifier.states[0] for one in (plain, expected)]
    assert states[0].tokens == states[1].tokens == [*PROMPT, *expected.tokens[:12]]
    assert states[0].head is not None and states[1].head is not None
    assert states[0].head.waiting_tokens == states[1].head.waiting_tokens
    assert all(map(mx.array_equal, states[0].head.waiting_hidden, states[1].head.waiting_hidden))


def test_chunks_overlap(checkpoints: Checkpoints) -> None:
    """A prompt whose chunks begin before the ones before are finished has the same first token, layers and pairs."""
    path, found = checkpoints(layers=4), []
    prompt = tuple(random_tokens(40))
    for overlap in (False, True):
        chain = Chain(path)
        engine, begun = chain.engines[0], list[BegunFrame]()
        for number in range(4):
            part = prompt[10 * number : 10 * number + 10]
            segment = Segment(0, number, 10 * number, part, sample=number == 3)
            ops = (Admit(0, 64, 40, SAMPLED),) if number == 0 else ()
            frame = Frame(EPOCH, engine.frames_done, ops, (segment,))
            assert may_overlap(frame) == (number > 0)
            begun.append(engine.begin_frame(frame, FrameStamps(0, StageStep)))
            while len(begun) > overlap or (begun and number == 3):
                (outcome,) = begun[0].finish_frame().outcomes
                begun.pop(0).clean_up()
        window = Segment(0, 4, 40, (outcome.token or 0,), open=True, sample=True, drafts=3)
        frame = Frame(EPOCH, engine.frames_done, (), (window,))
        assert not may_overlap(frame)
        found.append((outcome, engine.process(frame).outcomes))
    assert found[0] == found[1]


def test_a_group_ends_a_frame_with_drafts_first(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end may have collectives, which every member must have before those of the next frame."""
    device = replace(this_device(), ahead_kv_bytes=2**30)
    monkeypatch.setattr(frame_engine, "this_device", lambda: device)
    found = {}
    for size in (1, 2):
        plain = in_turn(checkpoints(layers=4), SamplingParams(), 1)
        monkeypatch.setattr(plain.engine, "group", SimpleNamespace(size=size, rank=0))
        for drafts in (0, 2):
            number = 2 + drafts // 2
            window = replace(plain.window(number, ahead=False), drafts=drafts)
            plain.finish(plain.begin(plain.commit(number - 1), [window]))
            following = Frame(EPOCH, 9, segments=(plain.window(number + 1, ahead=True),))
            found[size, drafts] = plain.engine.can_run_ahead(following)
    assert found == {(1, 0): True, (1, 2): True, (2, 0): True, (2, 2): False}


def test_known_tokens_after_a_window_that_continues_keep_their_order(
    checkpoints: Checkpoints,
) -> None:
    """A window with drafts from the text may follow before the header commits the one that continued."""
    path = checkpoints(layers=4)
    plain, begun = ahead(path, SamplingParams(), 3)
    expected = in_turn(path, SamplingParams(), 6)
    plain.finish(begun)
    known = tuple(expected.tokens[3:5])
    window = Segment(0, 4, len(PROMPT) + 3, known, open=True, sample=True)
    plain.finish(plain.begin([Commit(0, 2, 1)], [window]))
    assert plain.tokens[-1] == expected.tokens[5]
    state = plain.chain.verifier.states[0]
    assert state.tokens == [*PROMPT, *expected.tokens[:5]]
    assert state.head is not None
    assert state.head.waiting_tokens == [*PROMPT[1:], *expected.tokens[:6]][-len(state.head.waiting_tokens) :]


@pytest.mark.parametrize("finished", [False, True], ids=["before it finishes", "after"])
def test_a_window_after_the_end_of_the_text_leaves_nothing(checkpoints: Checkpoints, finished: bool) -> None:
    """A prefix saved at the end of a text does not hold the window that was in flight behind it."""
    path = checkpoints(layers=4)
    plain, begun = ahead(path, SamplingParams(), 6)
    expected = in_turn(path, SamplingParams(), 5)
    if finished:
        plain.finish(begun)
    plain.finish(plain.begin([Commit(0, 6, 0), SavePrefix(0, 0), Evict(0)], []))
    if not finished:
        plain.finish(begun)
    expected.finish(expected.begin([Commit(0, 5, 1), SavePrefix(0, 0), Evict(0)], []))
    text = [*PROMPT, *expected.tokens[:5]]
    follow_up = Segment(1, 0, len(text), (7, 8, 9), sample=True, drafts=3)
    outcomes = []
    for one in (plain, expected):
        saved = one.engine.prefixes[0].last_stage
        assert saved is not None and saved.tokens == text
        ops: list[Op] = [Admit(1, 64, len(text) + 3), RestorePrefix(1, 0)]
        outcomes.append(one.begin(ops, [follow_up]).finish_frame().outcomes)
    assert outcomes[0] == outcomes[1]


def test_only_a_stage_that_knows_the_token_continues(checkpoints: Checkpoints) -> None:
    """A segment that continues is refused without a chosen token, and where the host must see tokens first."""
    path = checkpoints(layers=4)
    plain = in_turn(path, SamplingParams(presence_penalty=0.5), 1)
    with pytest.raises(ProtocolError, match="cannot continue"):
        plain.begin(plain.commit(1), [plain.window(2, ahead=True)])
    stages = Chain(path, (2,)).engines
    window = Segment(0, 0, 0, (), open=True, sample=True, continues=True)
    with pytest.raises(ProtocolError, match="unknown token"):
        stages[0].process(Frame(EPOCH, 0, (Admit(0, 8, 1),), (window,)))
    with pytest.raises(ProtocolError, match="cannot use"):
        stages[1].receive_tokens(Frame(EPOCH, 0))


# ---- whole answers


async def answers(patched: pytest.MonkeyPatch, most_copied: int) -> tuple[list[Answered], int]:
    """Return answers of the built-in model, and how many frames began before the one before was finished."""
    device = replace(this_device(), ahead_kv_bytes=most_copied)
    patched.setattr(frame_engine, "this_device", lambda: device)
    unfinished: set[int] = set()
    overlaps = 0

    def begin(self: FrameEngine, frame: Frame, stamps: FrameStamps) -> BegunFrame:
        """Begin a frame, and count it if another one is unfinished."""
        nonlocal overlaps
        overlaps += bool(unfinished)
        unfinished.add(frame.number)
        return begin_frame(self, frame, stamps)

    def finish(self: EngineHost, begun: BegunFrame, *rest: Any) -> None:
        """Finish a frame."""
        unfinished.discard(begun.frame.number)
        finish_frame(self, begun, *rest)

    begin_frame, finish_frame = FrameEngine.begin_frame, EngineHost._finish_frame
    patched.setattr(FrameEngine, "begin_frame", begin)
    patched.setattr(EngineHost, "_finish_frame", finish)
    limits = Limits(context=512)
    local = partial(local_stages, limits=limits, mtp=MtpMode.parse("off"), dtype="float32")
    async with local(Checkpoint.open(checkpoint_dir())) as loop:
        request = GenerationRequest(tuple(range(300, 330)), 24, SAMPLED)
        first = await answer(loop, request)
        stopped = GenerationRequest(request.prompt, 24, SAMPLED, stop_tokens=frozenset({first.tokens[12]}))
        found = [first, await answer(loop, stopped)]
        # The next turn begins with the prefix entry that was saved when the stop token ended the text.
        text = (*request.prompt, *found[1].tokens, 400, 401, 402)
        found.append(await answer(loop, GenerationRequest(text, 8, SAMPLED)))
    patched.undo()
    return found, overlaps


@pytest.mark.thorough
async def test_large_caches_do_not_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames overlap while the K/V caches are small, which bounds copies of them. Answers are the same either way."""
    overlapping, overlaps = await answers(monkeypatch, 2**28)
    waiting, none = await answers(monkeypatch, 0)
    assert overlaps > 20 and none == 0
    assert [one.tokens for one in overlapping] == [one.tokens for one in waiting]
