"""A stage engine refuses frames that do not fit its state, and continues exactly from a saved prefix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mtp.layers.layer import KVFormat
from proto.errors import ProtocolError, StaleEpochError
from proto.frame import (
    Admit,
    Commit,
    DropPrefix,
    Evict,
    Frame,
    Op,
    Outcome,
    RestorePrefix,
    SavePrefix,
    Segment,
)
from proto.params import SamplingParams
from tests.conftest import Checkpoints
from tests.support.stages.chain import EPOCH, VOCAB, Chain, Script, random_tokens, same

PREFIX = 11
LONG = 17

# ---- frames it refuses


def _chunk(seq_id: int = 0, **changes: Any) -> Segment:
    return replace(Segment(seq_id, 0, 0, (1, 2, 3)), **changes)


def test_frames_come_in_order_and_of_this_epoch(checkpoints: Checkpoints) -> None:
    """A frame with a wrong number or epoch is refused, and the expected frame still runs."""
    engine = Chain(checkpoints(layers=4)).engines[0]
    admit = Frame(EPOCH, 0, (Admit(0, 100, 3),), (_chunk(),))
    with pytest.raises(ProtocolError, match="frame 1 arrived where 0 was expected"):
        engine.process(replace(admit, number=1))
    for epoch in (EPOCH - 1, EPOCH + 1):
        with pytest.raises(StaleEpochError, match=f"epoch {epoch}"):
            engine.process(replace(admit, epoch=epoch))
    out = engine.process(admit)
    assert out.outcomes == (Outcome(0, 0, accepted_length=3),)
    with pytest.raises(ProtocolError, match="frame 0 arrived where 1 was expected"):
        engine.process(admit)


BAD_OPS: list[tuple[Op, str]] = [
    (Admit(0, 100, 3), "admitted twice"),
    (Commit(7, 0, 1), "sequence 7 is not admitted"),
    (Commit(0, 9, 1), "window 9, which is not open"),
    (SavePrefix(7, 1), "sequence 7 is not admitted"),
    (SavePrefix(0, 1), "saved while a window is open"),
    (RestorePrefix(0, 1), "prefix 1 cannot be restored"),
    (RestorePrefix(1, 2), "prefix 2 cannot be restored"),
]


@pytest.mark.parametrize(("op", "message"), BAD_OPS, ids=lambda value: getattr(value, "kind", None))
def test_an_operation_that_does_not_fit_is_refused(checkpoints: Checkpoints, op: Op, message: str) -> None:
    """An operation that does not fit the state is refused.

    Sequence 0 has an open window, sequence 1 is empty, and prefix entry 1 exists.
    """
    engine = Chain(checkpoints(layers=4), (2,)).engines[0]
    ops = (Admit(2, 100, 3), SavePrefix(2, 1), Admit(0, 100, 3), Admit(1, 100, 3))
    engine.process(Frame(EPOCH, 0, ops, (_chunk(),)))
    window = Segment(0, 1, 3, (4, 5), open=True)
    engine.process(Frame(EPOCH, 1, (), (window,)))
    with pytest.raises(ProtocolError, match=message):
        engine.process(Frame(EPOCH, 2, (op,)))


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((_chunk(7),), "sequence 7 is not admitted"),
        ((_chunk(), _chunk(window=1, position=3)), "sequence 0 has two segments"),
        ((_chunk(tokens=(1, VOCAB)),), f"token {VOCAB}: the vocabulary has {VOCAB}"),
        ((_chunk(position=1),), "does not follow"),
        ((_chunk(tokens=()),), "does not follow"),
        ((_chunk(tokens=(1,) * 101),), "exceed the capacity of 100 tokens of sequence 0"),
    ],
    ids=["stranger", "twice", "no such token", "gap", "empty", "too long"],
)
def test_a_segment_that_cannot_run_is_refused(
    checkpoints: Checkpoints, segments: tuple[Segment, ...], message: str
) -> None:
    """An invalid segment is refused before the embedding lookup and before any cache changes."""
    engine = Chain(checkpoints(layers=4)).engines[0]
    with pytest.raises(ProtocolError, match=message):
        engine.process(Frame(EPOCH, 0, (Admit(0, 100, 3),), segments))


@pytest.mark.parametrize("width", [None, 32])
def test_a_middle_stage_needs_hidden_states_of_its_model(checkpoints: Checkpoints, width: int | None) -> None:
    """A middle stage refuses a frame without a tensor, and one with hidden states of another width."""
    engine = Chain(checkpoints(layers=4), (2,)).engines[1]
    frame = Frame(EPOCH, 0, (Admit(0, 100, 3),), (_chunk(),))
    if width is not None:
        frame = frame.with_tensor("float32", (3, width), bytes(4 * 3 * width))
    with pytest.raises(ProtocolError, match=r"expected \(3, 64\)"):
        engine.process(frame)


def test_each_stage_adds_its_time_and_operations_alone_make_a_frame(
    checkpoints: Checkpoints,
) -> None:
    """Every stage adds one entry to `stage_us`, also for a frame that has operations but no segment."""
    chain = Chain(checkpoints(layers=4), (1, 2))
    out = chain.send(ops=[Admit(0, 100, 3)])
    assert len(out.stage_us) == 3 and out.outcomes == () and out.dtype == ""
    chain.send(ops=[Evict(0), Evict(7)])
    assert all(not engine.report_state().sequences for engine in chain.engines)


# ---- prefixes


PARAMS = SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.4, presence_penalty=0.5, logprobs=2)


def _continue(chain: Chain, script: Script) -> list[Outcome]:
    """Feed the rest of the prompt, then decode with drafts. Return all outcomes."""
    outcomes = [script.run(chain, script.chunk(LONG, drafts=3))]
    for _ in range(6):
        outcomes.append(script.run(chain, script.next_window(drafts=3)))
    return outcomes


def _said(outcomes: list[Outcome]) -> list[tuple[object, ...]]:
    return [(o.accepted_length, o.token, o.drafts, o.logprobs) for o in outcomes]


def _restored(seq_id: int, tokens: list[int]) -> Script:
    script = Script(seq_id, tokens, PARAMS)
    script.scheduled = PREFIX
    script.ops.append(RestorePrefix(seq_id, 5))
    return script


def _save(path: Path, when: str, bits: int | None, text: list[int]) -> Chain:
    """Return a chain that saved the first PREFIX tokens of `text` as entry 5."""
    chain = Chain(path, (2,), KVFormat(bits, 32))
    script = Script(0, text[:PREFIX], SamplingParams(presence_penalty=0.1))
    script.run(chain, script.chunk(PREFIX, sample=when != "before the first token"))
    if when == "among drafts":
        script.ops.append(SavePrefix(0, 5))
        _continue_unsaved(chain, script)
        return chain
    chain.send(ops=[SavePrefix(0, 5), *([Evict(0)] if when == "as it leaves" else [])])
    return chain


def _continue_unsaved(chain: Chain, script: Script) -> None:
    """Send frames after the save. The entry must not change."""
    for _ in range(4):
        script.run(chain, script.next_window(drafts=2))


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("when", ["before the first token", "after it", "among drafts", "as it leaves"])
def test_a_restored_prefix_equals_a_prefill(checkpoints: Checkpoints, when: str, bits: int | None) -> None:
    """A sequence restored from a prefix continues bit for bit like one that prefilled the prefix.

    Layers, head, drafts, penalties and log-probabilities are compared. Two requests restore the same entry and continue
    differently, and the entry stays unchanged. It survives the eviction of its sequence in the header that saves it.
    """
    path = checkpoints(layers=4)
    text = random_tokens(LONG)
    chain = _save(path, when, bits, text)
    size = [h.bytes for engine in chain.engines for h in engine.report_state().prefixes]
    for seq_id, tokens in ((1, text), (2, [*text[:PREFIX], *random_tokens(5, seed=8)]), (3, text)):
        fresh = Chain(path, (2,), KVFormat(bits, 32))
        reader = Script(seq_id, tokens, PARAMS)
        reader.run(fresh, reader.chunk(PREFIX, sample=False))
        script = _restored(seq_id, tokens)
        assert _said(_continue(chain, script)) == _said(_continue(fresh, reader))
        assert same(chain.state(seq_id), fresh.state(seq_id))
        assert same(chain.head_state(seq_id), fresh.head_state(seq_id))
        assert mx.array_equal(chain.logits[seq_id], fresh.logits[seq_id])
    assert size == [h.bytes for engine in chain.engines for h in engine.report_state().prefixes]
    chain.send(ops=[DropPrefix(5), DropPrefix(5)])
    assert all(not engine.report_state().prefixes for engine in chain.engines)


@pytest.mark.parametrize("told", [(0,), (1,), (0, 1)])
def test_a_client_may_leave_while_its_prefix_is_saved(checkpoints: Checkpoints, told: tuple[int, ...]) -> None:
    """A cancellation that overtakes the header that saves a prefix does not change the entry.

    The entry's tokens have passed the last stage, so all stages save the same entry.
    """
    path = checkpoints(layers=4)
    text = random_tokens(LONG)
    chain, fresh = Chain(path, (2,)), Chain(path, (2,))
    script = Script(0, text)
    script.run(chain, script.chunk(PREFIX, sample=False))
    chain.post(script.chunk(LONG), ops=[SavePrefix(0, 5)])
    for stage in told:
        chain.engines[stage].cancel(EPOCH, 0)
    assert chain.drain()[0].outcomes[0].cancelled
    chain.send(ops=[Evict(0)])
    reader = Script(1, text, PARAMS)
    reader.run(fresh, reader.chunk(PREFIX, sample=False))
    assert _said(_continue(chain, _restored(1, text))) == _said(_continue(fresh, reader))
