"""Exhaustive walks of the protocol over frames, signals, clients and crashes, in every order.

Each client gets its text, complete and once. All stages hold what the coordinator assumes, and nothing is left at the
end. `World.check` asserts the contract of every state, `World.check_end` that of every end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.planning.capacity import Capacity
from coordinator.schedule import admission, prefix_cache
from coordinator.schedule.admission import Limits
from coordinator.schedule.request import GenerationRequest
from coordinator.schedule.scheduler import Scheduler
from tests.support.protocol.model import PROMPT, ROOM, Scheduled, Walk, World, explore
from tests.support.stages import token_stages
from tests.support.stages.token_stages import truth
from worker.engine.frame_engine import FrameEngine

MAX_STATES = 10**6


def scheduled(
    mtp: str,
    stages: int,
    *lengths: int,
    leaves: int = 0,
    crashes: int = 0,
    room: Capacity = ROOM,
    prompt: int = PROMPT,
    chunk: int = 1,
    stop: int | None = None,
    grouped: bool = False,
    clients: str = "",
) -> Walk:
    """Walk the real scheduler with requests of `lengths` tokens, `leaves` leaving clients and `crashes` crashes.

    Each letter of `clients` names the client of one request. The text of each sequence stops after `stop` tokens.
    With `grouped` a group of two holds each stage.
    """
    limits = Limits(64, prefill_chunk=chunk, step_tokens=2 * chunk)
    scheduler = Scheduler(limits, Controller(MtpMode.parse(mtp)))
    stops = frozenset(truth(i, prompt + stop + 1)[-1] for i in range(2)) if stop is not None else frozenset()
    requests = tuple(
        GenerationRequest(tuple(truth(i, prompt)), n, stop_tokens=stops, client=clients[i : i + 1])
        for i, n in enumerate(lengths)
    )
    coordinator = Scheduled(scheduler, requests, leaves, room)
    walk = explore(World.start(coordinator, stages, crashes, grouped=grouped), MAX_STATES)
    print(walk)
    assert (walk.met["leave"] > 0, walk.met["crash,"] > 0) == (leaves > 0, crashes > 0)
    return walk


SLOW = (pytest.mark.slow, pytest.mark.timeout(1800))


def case(mtp: str, stages: int, *lengths: int, marks: Any = (), **options: Any) -> Any:
    """Return the parameters of a walk, with the options of `scheduled`."""
    return pytest.param(mtp, stages, lengths, options, marks=marks)


@pytest.mark.parametrize(
    ("mtp", "stages", "lengths", "options"),
    [
        case("1", 2, 3, 3),
        case("1", 3, 3, 2),
        case("1", 2, 3, 2, crashes=1, marks=pytest.mark.thorough),
        case("1", 2, 3, 2, leaves=1, marks=pytest.mark.thorough),
        case("1", 1, 2, 1, leaves=1, crashes=1),
        case("1", 3, 3, 2, leaves=1, marks=SLOW),
        case("1", 1, 3, 1, leaves=1, crashes=1, marks=SLOW),
        case("1", 2, 3, 2, leaves=1, crashes=1, marks=SLOW),
        case("1", 3, 3, 3, crashes=2, marks=SLOW),
        case("1", 2, 4, 4, crashes=1, marks=SLOW),
        # A window of one sequence for every stage, all but the first speculative.
        case("filled", 2, 5),
        case("filled", 3, 5),
        case("filled", 2, 5, leaves=1),
        case("filled", 2, 4, crashes=1),
        case("filled", 2, 4, 3),
        # One stage continues with tokens that the coordinator does not know yet.
        case("off", 1, 4, leaves=1, crashes=1),
        case("off", 1, 5, leaves=1, stop=2),
        case("off", 1, 4, 3, stop=2),
        case("off", 1, 3, 3, leaves=1, stop=2),
        case("off", 1, 4, crashes=1, stop=3),
        # The first stage continues with tokens that the last stage relays, before or after the frame and the outcome.
        case("off", 2, 3, leaves=1, crashes=1),
        case("off", 2, 5, leaves=1, stop=2),
        case("off", 2, 5, 4, stop=3),
        case("off", 3, 5, leaves=1, stop=2),
        # Signals reach the first member of a group at any time, and the others run what it has decided.
        case("1", 1, 3, 2, leaves=1, grouped=True),
        case("1", 2, 3, 2, leaves=1, grouped=True, marks=pytest.mark.thorough),
        case("filled", 2, 3, crashes=1, grouped=True),
        case("filled", 2, 4, leaves=1, crashes=1, grouped=True, marks=SLOW),
        case("off", 1, 4, leaves=1, crashes=1, grouped=True),
        case("off", 1, 5, leaves=1, stop=2, grouped=True),
        case("off", 1, 4, 3, stop=2, grouped=True),
        case("off", 2, 4, leaves=1, grouped=True),
    ],
)
def test_the_scheduler_over_stages(mtp: str, stages: int, lengths: tuple[int, ...], options: dict[str, Any]) -> None:
    """Chunked prefill, micro-batches, speculative windows and stages that run ahead keep the contract.

    Misspeculations, ends of texts, leaving clients and crashes occur while windows are in flight.
    """
    both_run_ahead = mtp == "off" and stages > 1
    room = replace(ROOM, sequences=4) if both_run_ahead else ROOM
    walk = scheduled(mtp, stages, *lengths, room=room, **options)
    assert walk.met["submit"] and walk.met["pass"]
    assert stages == 1 or walk.met["News"]
    if mtp == "off" and (stages == 1 or "grouped" not in options):
        assert walk.met["ahead" if stages == 1 else "relay"]


def test_a_member_that_decides_by_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk finds a group whose members run what each of them would, and not what the first has decided."""
    monkeypatch.setattr(FrameEngine, "_decided", lambda _, frame, segments: frame)
    with pytest.raises(AssertionError, match="after"):
        scheduled("off", 1, 4, leaves=1, grouped=True)


@pytest.mark.parametrize(
    ("stages", "lengths", "leaves", "crashes", "mtp", "chunk"),
    [(1, (3, 2, 1), 0, 1, "off", 2), (2, (5, 3, 1), 0, 0, "1", 8), (2, (2, 1, 1), 1, 0, "off", 2)],
)
def test_a_sequence_pauses(
    stages: int,
    lengths: tuple[int, ...],
    leaves: int,
    crashes: int,
    mtp: str,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sequence that gives its place to another client returns and continues its text, and the contract holds.

    Signals for its former windows arrive before or after its return.
    """
    monkeypatch.setattr(admission, "TURN_SECONDS", 0.0)
    walk = scheduled(mtp, stages, *lengths, leaves=leaves, crashes=crashes, chunk=chunk, clients="aab")
    assert walk.met["pause"]


def test_a_prompt_in_one_chunk() -> None:
    """Window numbers exceed those of a rebuilt sequence's chunks.

    The drafts of a window are not confused with those of a chunk.
    """
    scheduled("1", 2, 4, crashes=2, chunk=8)
    scheduled("1", 1, 3, 3, crashes=1, chunk=8)


def test_prefix_entries_are_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """While clients leave, every stage has the same entries, and they hold the right text."""
    monkeypatch.setattr(prefix_cache, "SMALLEST_ENTRY", 1)
    monkeypatch.setattr(prefix_cache, "BLOCK", 1)
    monkeypatch.setattr(token_stages, "first_token", lambda _: 20)
    room = Capacity(sequences=1, kv_tokens=64, prefix_bytes=4, token_bytes=1)
    scheduled("1", 2, 1, 1, leaves=1, room=room, prompt=3)


def test_a_pause_keeps_the_same_state_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence returns from the entry that its pause has made, which every stage has, while clients leave."""
    monkeypatch.setattr(prefix_cache, "SMALLEST_ENTRY", 1)
    monkeypatch.setattr(prefix_cache, "BLOCK", 1)
    monkeypatch.setattr(admission, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(token_stages, "first_token", lambda _: 20)
    room = Capacity(sequences=1, kv_tokens=64, prefix_bytes=8, token_bytes=1)
    walk = scheduled("1", 2, 3, 1, leaves=1, room=room, prompt=3, clients="ab")
    assert walk.met["pause"]
