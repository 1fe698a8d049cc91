"""The answers of the scheduler, also of a filled pipeline: complete, without repetition, ended in the right place."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.drafts.averages import Shape, StepCost
from coordinator.drafts.controller import MAX_DEPTH, Controller, MtpMode
from coordinator.drafts.prompt_lookup import NgramMode
from coordinator.planning.capacity import Capacity
from coordinator.schedule.admission import Limits
from coordinator.schedule.prefix_cache import block_keys, place_of
from coordinator.schedule.request import GenerationRequest, TokenChunk
from coordinator.schedule.scheduler import KV_STEP, may_run_ahead
from coordinator.schedule.sequence import Sequence
from proto.control import Rollback
from proto.frame import Admit, Commit, Evict
from proto.params import SamplingParams
from tests.support.protocol.scheduler_drive import LIMITS, ROOM, Drive, chunks_of, is_decode
from tests.support.stages.token_stages import WORDS, FakeLastStage, plain

# ---- one answer


@patch("coordinator.schedule.backups.MIN_NEW_TOKENS", 3)
@settings(max_examples=100, deadline=None)
@given(
    stages=st.integers(1, 6),
    mtp=st.sampled_from(["off", "1", "2", "3", "4", "filled", "filled", "filled"]),
    right=st.integers(0, 5),
    seed=st.integers(),
)
def test_any_order_of_events_keeps_the_answers(stages: int, mtp: str, right: int, seed: int) -> None:
    """Submitting, sending, returning, cancelling and replacing the plan in any order changes no answer.

    No stage gets an invalid frame, and nothing is left at the end.
    """
    moves = random.Random(seed)
    limits = Limits(context=100, prefill_chunk=3, step_tokens=7)
    room = Capacity(sequences=3, kv_tokens=150, prefix_bytes=0)
    drive = Drive(stages, 0, limits, room, FakeLastStage(right=right), mtp=mtp)
    wanted: dict[int, list[int]] = {}
    for _ in range(120):
        match moves.choices(["submit", "send", "back", "cancel", "reset"], [2, 10, 10, 1, 0.3])[0]:
            case "submit" if len(wanted) < 8:
                prompt = [moves.randrange(50) for _ in range(moves.randint(1, 20))]
                count, request_seed = moves.randint(1, 25), moves.randrange(9)
                drafts = moves.choice([None, None, 0, 1, 3])
                seq_id = drive.submit(prompt, count, seed=request_seed, drafts=drafts)
                wanted[seq_id] = plain(prompt, count, request_seed)
            case "send":
                drive.send()
            case "back" if drive.stage.in_flight:
                drive.back()
            case "cancel" if wanted:
                seq_id = moves.choice(sorted(wanted))
                drive.scheduler.cancel_sequence(seq_id)
                got = drive.tokens(seq_id)
                assert got == wanted.pop(seq_id)[: len(got)]
            case "reset":
                stage = FakeLastStage(drive.stage.epoch + 1, right=right)
                drive.new_plan(stage, moves.randint(1, 6), room)
    drive.run()
    for seq_id, tokens in wanted.items():
        assert drive.tokens(seq_id) == tokens
        assert drive.finished(seq_id).reason == "length"
    assert not drive.stage.sequences
    assert not drive.scheduler.running


@settings(max_examples=60, deadline=None)
@given(stages=st.integers(1, 3), budget=st.sampled_from([0, 300, 700, 5000]), seed=st.integers())
def test_prefixes_keep_the_answers(stages: int, budget: int, seed: int) -> None:
    """A prefix cache with few entries changes no answer, while requests are cancelled and rebuilt.

    Prompts share beginnings. Stages only restore entries that they hold.
    """
    moves = random.Random(seed)
    limits = Limits(context=1000, prefill_chunk=50, step_tokens=70)
    room = Capacity(sequences=2, kv_tokens=2000, prefix_bytes=budget, token_bytes=1)
    drive = Drive(stages, 2, limits, room)
    beginnings = [[moves.randrange(50) for _ in range(300)] for _ in range(2)]
    wanted: dict[int, list[int]] = {}
    for _ in range(150):
        match moves.choices(["submit", "send", "back", "cancel", "reset"], [2, 10, 10, 0.5, 0.2])[0]:
            case "submit" if len(wanted) < 8:
                shared = moves.choice(beginnings)[: moves.choice([100, 160, 300])]
                prompt = [*shared, *(moves.randrange(50) for _ in range(moves.randint(1, 70)))]
                stop = moves.sample(range(WORDS), 8)
                seq_id = drive.submit(prompt, 10, seed=len(wanted), stop=stop)
                whole = plain(prompt, 10, len(wanted))
                end = next((i for i, token in enumerate(whole) if token in stop), 10)
                wanted[seq_id] = whole[:end]
            case "send":
                drive.send()
            case "back" if drive.stage.in_flight:
                drive.back()
            case "cancel" if wanted:
                seq_id = moves.choice(sorted(wanted))
                drive.scheduler.cancel_sequence(seq_id)
                del wanted[seq_id]
            case "reset":
                drive.new_plan(FakeLastStage(drive.stage.epoch + 1), moves.randint(1, 3), room)
        held = sum(map(len, drive.stage.prefixes.values()))
        assert held <= budget
    drive.run()
    for seq_id, tokens in wanted.items():
        assert drive.tokens(seq_id) == tokens
    entries = drive.scheduler.prefixes.entries
    assert drive.stage.prefixes.keys() == entries.keys()
    for number, held_tokens in drive.stage.prefixes.items():
        assert place_of(held_tokens, len(held_tokens), block_keys(held_tokens)) == entries[number].place


def test_a_long_turn_costs_milliseconds() -> None:
    """A prompt of 130,000 tokens is checked, queued, admitted and saved in 50 ms of the event loop, at best of two."""
    room = Capacity(sequences=1, kv_tokens=10**6, prefix_bytes=10**6, token_bytes=1)
    drive = Drive(limits=Limits(10**6, prefill_chunk=2**16), room=room)
    times = []
    for i in range(2):
        prompt = [*range(130_000), i]
        started = time.process_time()
        drive.submit(prompt, tokens=2)
        first = drive.scheduler.next_frame(0.0)
        assert first is not None and first.segments
        drive.scheduler.cancel_sequence(i)
        assert len(drive.scheduler.prefixes.entries) == 1, "the later entry of the text replaces the earlier one"
        times.append(time.process_time() - started)
        drive.scheduler.in_flight.clear()
    assert min(times) < 0.05


def test_the_turn_of_a_chat_is_saved_and_a_final_answer_is_not() -> None:
    """The entry of a chat ends where its next turn differs, and an answer without continuation is not saved."""
    drive = Drive(limits=Limits(1000), room=replace(ROOM, prefix_bytes=1000, token_bytes=1))
    request = GenerationRequest(tuple(i % 50 for i in range(200)), 12, turn=197, continued=False)
    drive.scheduler.submit(request, drive.now)
    drive.run()
    entries = drive.scheduler.prefixes.entries.values()
    assert [entry.place for entry in entries] == [place_of(request.prompt, 197, block_keys(request.prompt))]


def test_the_next_turn_starts_from_the_last_answer() -> None:
    """The state at the end of an answer is an entry, and at least one token of the next prompt is computed."""
    limits = replace(LIMITS, prefill_chunk=64, step_tokens=64)
    room = replace(ROOM, prefix_bytes=2000, token_bytes=1)
    drive = Drive(depth=2, limits=limits, room=room, stage=FakeLastStage(right=5))
    prompt = [i % 50 for i in range(200)]
    first = drive.submit(prompt, 12)
    drive.run()
    held = [*prompt, *drive.tokens(first)][:-1]
    longer, same = drive.submit([*held, 1, 2, 3], 5), drive.submit(held, 5)
    drive.run()
    assert drive.finished(longer).stats.cached_tokens == len(held)
    assert 192 <= drive.finished(same).stats.cached_tokens < len(held)
    assert drive.tokens(same) == plain(held, 5)


# ---- where a text ends


@pytest.mark.parametrize("tokens", range(1, 12))
def test_max_tokens_ends_inside_a_window(tokens: int) -> None:
    """Exactly `max_tokens` tokens are emitted.

    No stage gets more than the sequence's capacity, or a request for drafts that cannot be used.
    """
    drive = Drive(depth=3, stage=FakeLastStage(right=5))
    seq_id = drive.submit(tokens=tokens)
    drive.run()
    assert drive.tokens(seq_id) == plain((1, 2, 3), tokens)
    stats = drive.finished(seq_id).stats
    assert stats.completion_tokens == tokens
    assert stats.drafted == stats.accepted
    for frame in drive.stage.seen:
        for segment in frame.segments:
            confirmed = segment.position + (1 if segment.open else segment.width)
            assert segment.drafts == 0 or confirmed + 1 + segment.drafts < 3 + tokens


@pytest.mark.parametrize("end", range(8))
@pytest.mark.parametrize("right", [0, 3, 5])
def test_a_stop_token_ends_the_text_wherever_it_stands(end: int, right: int) -> None:
    """A stop token and all after it are neither emitted nor counted, as first token, draft or target."""
    whole = plain((1, 2, 3), 8)
    assert len(set(whole)) == len(whole), "the stop token must not come earlier"
    drive = Drive(depth=3, stage=FakeLastStage(right=right))
    seq_id = drive.submit(stop=(whole[end],))
    drive.run()
    finished = drive.finished(seq_id)
    assert drive.tokens(seq_id) == whole[:end]
    assert finished.reason == "stop"
    assert finished.stats.completion_tokens == end
    assert finished.stats.accepted <= max(0, end - 1)
    assert not drive.stage.sequences


def test_logprobs_go_with_their_tokens() -> None:
    """Each token chunk has one entry per token, also if the text ends inside a window."""
    drive = Drive(depth=3)
    stop = plain((1, 2, 3), 10)[9]
    seq_id = drive.submit(logprobs=0, stop=(stop,))
    drive.run()
    for event in drive.events[seq_id]:
        if isinstance(event, TokenChunk):
            assert [entry.token for entry in event.logprobs] == list(event.tokens)


# ---- windows


def test_rollbacks_name_the_lost_tokens() -> None:
    """Each window that lost tokens has one rollback with their number. Other windows have none."""
    drive = Drive(depth=3)
    seq_id = drive.submit(tokens=40)
    drive.run()
    widths = {s.window: s.width for f in drive.stage.seen for s in f.segments if s.open}
    commits = [op for f in drive.stage.seen for op in f.ops if isinstance(op, Commit)]
    lost = [c for c in commits if c.accepted_length < widths[c.window]]
    assert lost
    assert len(lost) < len(commits)
    assert drive.rollbacks == [Rollback(seq_id, c.window, widths[c.window] - c.accepted_length) for c in lost]


def test_draft_counters_are_by_position() -> None:
    """Each position counts its drafts and its accepted drafts."""
    drive = Drive(depth=2, stage=FakeLastStage(right=0))
    seq_id = drive.submit(tokens=10)
    drive.run()
    stats = drive.finished(seq_id).stats
    assert stats.accepted_by_position == (0, 0)
    assert stats.windows == 9
    # The last windows have room for fewer drafts, the very last for none.
    assert stats.drafted_by_position == (8, 7)


# ---- another plan


@pytest.mark.parametrize("returned", range(9))
@pytest.mark.parametrize("stages", [1, 3])
def test_a_new_plan_continues_after_the_emitted_tokens(returned: int, stages: int) -> None:
    """A new plan admits every running sequence again with its own tokens as prompt.

    The answers are those of an undisturbed run, and no token is emitted twice.
    """
    drive = Drive(stages=2, depth=2)
    ids = [drive.submit((1, 2, 3), 25), drive.submit(range(1, 20), 12, seed=4)]
    drive.fill()
    for _ in range(returned):
        drive.back()
        drive.fill()
    emitted = [len(drive.tokens(i)) for i in ids]
    drive.new_plan(FakeLastStage(epoch=7), stages)
    drive.run()
    assert drive.tokens(ids[0]) == plain((1, 2, 3), 25)
    assert drive.tokens(ids[1]) == plain(range(1, 20), 12, seed=4)
    admits = [op for f in drive.stage.seen for op in f.ops if isinstance(op, Admit)]
    assert {op.seq_id: op.prompt for op in admits} == {ids[0]: 3, ids[1]: 19}
    fed = Counter[int]()
    for chunk in chunks_of(drive.stage.seen):
        fed[chunk.seq_id] += chunk.width
    assert [fed[i] for i in ids] == [3 + emitted[0], 19 + emitted[1]]


def test_a_smaller_plan_ends_what_it_cannot_hold() -> None:
    """A sequence that exceeds the new plan ends with an error. The others continue, the oldest first."""
    drive = Drive(room=replace(ROOM, sequences=2))
    big, small, queued = drive.submit(tokens=60), drive.submit(tokens=20), drive.submit(tokens=21)
    drive.fill()
    drive.back()
    drive.new_plan(FakeLastStage(epoch=1), room=Capacity(1, 40, 0))
    ended = drive.finished(big)
    assert (ended.reason, ended.stats.completion_tokens) == ("error", len(drive.tokens(big)))
    assert "memory" in (ended.error or "")
    drive.fill()
    assert list(drive.scheduler.running) == [small]
    drive.run()
    assert drive.tokens(small) == plain((1, 2, 3), 20)
    assert drive.tokens(queued) == plain((1, 2, 3), 21)


# ---- calls of the controller


class Listener(Controller):
    """A controller that records its calls."""

    def __init__(self, depth: int) -> None:
        super().__init__(MtpMode(depth))
        self.drafts: list[list[tuple[int, bool]]] = []
        self.steps: list[tuple[int, int, int, float]] = []

    def record_drafts(self, drafts: Iterable[tuple[int, bool]]) -> None:
        """Append the results."""
        self.drafts.append(list(drafts))

    def record_step_cost(self, sequences: int, fill: int, rows: int, drafts: int, shape: Shape, cost: StepCost) -> None:
        """Append the step."""
        self.steps.append((sequences, rows, drafts, cost.seconds))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("mtp", ["auto", "2", "filled"])
def test_a_request_has_the_drafts_that_it_asks_for(stages: int, mtp: str) -> None:
    """Its windows have that number of drafts, and none from the text, beside others that the controller chooses."""
    drive = Drive(stages, mtp=mtp, ngram=NgramMode.auto)
    asked = {drive.submit([1, 2, 3] * 5, tokens=40, drafts=drafts): drafts for drafts in (0, 1, 9, None)}
    drive.run()
    windows = [s for frame in drive.stage.seen for s in frame.segments if s.open and not s.continues]
    for seq_id, drafts in asked.items():
        assert drive.tokens(seq_id) == plain([1, 2, 3] * 5, 40)
        widths = {segment.width for segment in windows if segment.seq_id == seq_id}
        assert drafts is None or max(widths) == min(drafts, MAX_DEPTH) + 1


def test_a_plan_without_a_head_drafts_for_no_request() -> None:
    """With `--mtp off` the stages hold no head, so a request for drafts gets none."""
    drive = Drive(mtp="off")
    drive.submit(tokens=10, drafts=2)
    drive.run()
    assert not any(segment.drafts for frame in drive.stage.seen for segment in frame.segments)


def test_the_controller_gets_windows_and_steps() -> None:
    """The controller gets the draft results of every window, and the cost of every step.

    The cost of a step alone in the pipeline is the time from sending to return. Prompt chunks are no steps.
    """
    drive = Drive(depth=2)
    drive.scheduler.controller = listener = Listener(2)
    drive.submit(range(1, 10), tokens=20)
    drive.run()
    windows = [s for f in drive.stage.seen for s in f.segments if s.open]
    assert [len(drafts) for drafts in listener.drafts] == [s.width - 1 for s in windows]
    assert listener.steps == [(1, s.width, s.drafts, 1.0) for s in windows]


def test_a_step_of_a_full_pipeline_costs_a_real_cycle() -> None:
    """With a micro-batch in flight for each stage, a step costs the time from token to token.

    Frames return every second here, so each of two micro-batches returns every two seconds. The chunks of a prompt
    between them make cycles longer, and do not change the cost of a step.
    """
    drive = Drive(stages=2, stage=FakeLastStage(stage_us=5000))
    for i in range(4):
        drive.submit((1, 2, i), tokens=30)
    drive.run_frames(12)
    drive.scheduler.controller = listener = Listener(0)
    for step in range(20):
        if step == 10:
            drive.submit(range(60), tokens=1)
        drive.fill()
        drive.back()
    frames = drive.stage.seen[-20:]
    assert any(chunks_of([frame]) for frame in frames)
    assert {(*step[:3], round(step[3], 3)) for step in listener.steps} == {(2, 2, 0, 2.0)}


PROMPT = (1, 2, 3, 4, 5)


def driven(stages: int, right: int = 3, out_of: int = 5, mtp: str = "filled") -> Drive:
    """Return a driver of a filled pipeline."""
    return Drive(stages=stages, stage=FakeLastStage(right=right, out_of=out_of), mtp=mtp)


class Fixed(Controller):
    """A controller that fills the pipeline with windows of `width` tokens."""

    def __init__(self, width: int) -> None:
        super().__init__(MtpMode.parse("filled"))
        self.width = width

    def choose_shape(self, sequences: int = 1, fill: int = 1) -> Shape:
        """Return windows of the fixed width."""
        return Shape(self.width, fill)


def max_in_flight(drive: Drive) -> int:
    """Run to the end. Return the maximum number of valid windows of one sequence in flight."""
    most = 0
    drive.fill()
    while drive.stage.in_flight:
        most = max([most, *(len(s.windows_in_flight) for s in drive.scheduler.running.values())])
        drive.back()
        drive.fill()
    return most


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("right", "out_of"), [(0, 5), (1, 2), (4, 5), (5, 5)])
def test_one_stream_fills_every_stage(stages: int, right: int, out_of: int) -> None:
    """One window per stage is in flight for any acceptance, and the text is that of plain decoding.

    A single stage runs ahead, so it has two.
    """
    drive = driven(stages, right, out_of)
    seq = drive.submit(PROMPT, tokens=40)
    assert max_in_flight(drive) == max(2, stages)
    assert drive.tokens(seq) == plain(PROMPT, 40)
    assert not drive.stage.sequences


def test_right_speculation_costs_one_frame_a_token() -> None:
    """If every draft is right, no token is taken back, and each window of one token brings its token."""
    drive = driven(4, right=5, out_of=5)
    drive.scheduler.controller = Fixed(1)
    seq = drive.submit(PROMPT, tokens=40)
    drive.run()
    assert drive.rollbacks == []
    assert len([f for f in drive.stage.seen if is_decode(f)]) == 39
    stats = drive.finished(seq).stats
    assert stats.accepted == stats.drafted


def test_a_prompt_that_comes_empties_the_stages_for_its_chunks() -> None:
    """While a prompt is prefilled, a running stream sends one window at a time."""
    drive = driven(4, right=5)
    first = drive.submit(PROMPT, tokens=60)
    drive.run_frames(10)
    drive.submit(range(1, 60), tokens=1)
    seen = len(drive.stage.seen)
    drive.fill()
    late = [s for f in drive.stage.seen[seen:] for s in f.segments]
    assert late and not any(s.open and s.seq_id == first for s in late)
    drive.run()
    assert drive.tokens(first) == plain(PROMPT, 60)


def test_no_more_windows_than_there_is_memory_for() -> None:
    """A plan with memory for two sequences has room for two open windows and two states: three windows of one.

    With memory for one sequence the stages run ahead with a second window, but no draft is speculative.
    """
    for sequences, most in ((1, 2), (2, 3), (16, 8)):
        room = replace(ROOM, sequences=sequences)
        drive = Drive(stages=8, room=room, stage=FakeLastStage(right=5), mtp="filled")
        drive.submit(PROMPT, tokens=40)
        assert max_in_flight(drive) == most


def test_a_stop_invalidates_the_windows_in_flight() -> None:
    """Windows after the end of a text emit nothing, and the saved prefix is the state of the stages."""
    expected = plain(PROMPT, 40)
    for at in range(1, 39):
        end = expected.index(expected[at])
        room = replace(ROOM, prefix_bytes=10**6)
        drive = Drive(stages=4, room=room, stage=FakeLastStage(right=5), mtp="filled")
        seq = drive.submit(PROMPT, tokens=40, stop=[expected[at]])
        drive.run()
        assert drive.tokens(seq) == expected[:end]
        assert drive.finished(seq).reason == "stop"
        assert any(isinstance(op, Evict) for f in drive.stage.seen for op in f.ops)
        assert not drive.stage.sequences


def running(count: int, prompt: int = 100, answer: int = 100) -> list[Sequence]:
    request = GenerationRequest(tuple(range(prompt)), answer, SamplingParams())
    return [Sequence(seq_id, request, 0.0) for seq_id in range(count)]


@pytest.mark.parametrize("stages", [2, 4])
def test_several_stages_run_ahead_with_every_place_taken(stages: int) -> None:
    """Stages that run one frame at a time hold the three states of a sequence that the plan reserves."""
    assert may_run_ahead(Capacity(8, 8 * 200, 0), stages, running(8))


def test_a_single_stage_copies_its_caches_into_tokens_that_nobody_reserved() -> None:
    """With every place taken, the copies of K/V must fit beside the capacities of the running sequences."""
    reserved, copies = 8 * 200, 8 * (100 + KV_STEP)
    assert not may_run_ahead(Capacity(8, reserved + copies - 1, 0), 1, running(8))
    assert may_run_ahead(Capacity(8, reserved + copies, 0), 1, running(8))


def test_a_single_stage_with_free_places_runs_ahead() -> None:
    """The memory of the places that are not taken holds the second windows and the copies."""
    assert not may_run_ahead(Capacity(8, 8 * 200, 0), 1, running(6))
    assert may_run_ahead(Capacity(8, 8 * 200, 0), 1, running(5))
