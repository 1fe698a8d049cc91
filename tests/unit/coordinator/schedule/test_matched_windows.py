"""Windows whose drafts come from the text, in the scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Row

import pytest

from coordinator.drafts.prompt_lookup import NgramMatcher, NgramMode
from coordinator.schedule.request import GenerationRequest
from coordinator.schedule.sequence import Sequence
from proto.params import Acceptance, SamplingParams
from tests.support.protocol.scheduler_drive import Drive, is_decode
from tests.support.stages.token_stages import WORDS, FakeLastStage

PERIOD = 13
PROMPT = tuple(range(1, PERIOD + 1)) * 2


def edited(tokens: Row[int], seed: int) -> int:
    """Return the token PERIOD places before, with a change now and then."""
    return (tokens[-PERIOD] + (len(tokens) % 50 == 0) + seed) % WORDS


def decoded(count: int) -> list[int]:
    """Return the text of `count` tokens after PROMPT."""
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(edited(tokens, 0))
    return tokens[len(PROMPT) :]


def run(stages: int, mtp: str, ngram: NgramMode, streams: int = 1) -> tuple[Drive, list[int]]:
    """Return a drive after answers of 150 tokens, and their sequences."""
    stage = FakeLastStage(stage_us=100)
    stage.text.target = edited
    drive = Drive(stages, stage=stage, mtp=mtp, ngram=ngram)
    sequences = [drive.submit(PROMPT, tokens=150) for _ in range(streams)]
    drive.run()
    return drive, sequences


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("mtp", ["off", "2", "auto", "filled"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_text_that_repeats_takes_fewer_passes(stages: int, mtp: str, streams: int) -> None:
    """The tokens are those without n-grams, and the passes are fewer."""
    drive, sequences = run(stages, mtp, NgramMode.auto, streams)
    before, _ = run(stages, mtp, NgramMode.off, streams)
    for seq_id in sequences:
        assert drive.tokens(seq_id) == decoded(150)
    passes, usual = (sum(map(is_decode, one.stage.seen)) for one in (drive, before))
    assert passes < usual / 1.3


def test_no_drafts_are_requested_beside_a_match() -> None:
    """The head computes nothing for windows that take their drafts from the text."""
    drive, _ = run(1, "2", NgramMode.auto)
    wide = [s for frame in drive.stage.seen for s in frame.segments if s.open and s.width > 3]
    assert wide and not any(segment.drafts for segment in wide)


def test_a_match_stops_before_a_stop_token() -> None:
    """A window never carries a stop token, so the text ends where it ends without drafts."""
    stage = FakeLastStage()
    stage.text.target = edited
    drive = Drive(stage=stage, mtp="off", ngram=NgramMode.auto)
    seq_id = drive.submit(PROMPT * 2, tokens=100, stop=(8,))
    drive.run()
    assert drive.tokens(seq_id) == decoded(100)[: decoded(100).index(8)]
    assert not any(8 in s.tokens for f in drive.stage.seen for s in f.segments if s.open)


@pytest.mark.parametrize(("stop", "usable"), [(8, False), (9, True)])
def test_a_match_that_begins_with_a_stop_token_is_not_used(stop: int, usable: bool) -> None:
    """It has no draft to send, so the head drafts."""
    text = (1, 2, 3, 4, 8, 9, 5, 1, 2, 3, 4)
    request = GenerationRequest(text, 10, stop_tokens=frozenset({stop}))
    sequence = Sequence(0, request, 0.0, matcher=NgramMatcher())
    assert sequence.matcher is not None and not sequence.has_match
    sequence.matcher.follow(sequence.tokens)
    assert sequence.matcher.drafts[0] == 8 and sequence.has_match is usable


@pytest.mark.parametrize(
    ("acceptance", "stages", "mtp"), [("ratio", 1, "2"), ("ratio", 4, "filled"), ("match", 1, "2")]
)
def test_a_window_names_the_window_that_brought_its_drafts(
    acceptance: Acceptance, stages: int, mtp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the ratio rule the last stage needs to know which chain, and drafts of the text have none."""
    brought: dict[int, tuple[int, ...]] = {}
    take = Sequence._take_drafts
    monkeypatch.setattr(
        Sequence,
        "_take_drafts",
        lambda self, found: (brought.update({found.window: found.drafts}), take(self, found))[1],
    )
    stage = FakeLastStage(stage_us=100)
    stage.text.target = edited
    drive = Drive(stages, stage=stage, mtp=mtp, ngram=NgramMode.auto)
    params = SamplingParams(temperature=1.0, acceptance=acceptance)
    seq_id = drive.scheduler.submit(GenerationRequest(PROMPT, 150, params), drive.now).seq_id
    drive.run()
    assert drive.tokens(seq_id) == decoded(150)
    wide = [s for frame in stage.seen for s in frame.segments if s.open and s.width > 1]
    sources = {s.window - s.source for s in wide if s.source}
    assert sources <= brought.keys() and (acceptance == "match") == (not sources)
    for s in (s for s in wide if s.source):
        drafts = brought[s.window - s.source]
        assert any(drafts[i : i + s.width - 1] == s.tokens[1:] for i in range(len(drafts)))
    assert any(not s.source for s in wide), "no window took drafts of the text"
