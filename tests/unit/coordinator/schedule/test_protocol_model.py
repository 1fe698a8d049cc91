"""Exhaustive walks of the protocol over frames, signals, clients and crashes, in every order.

Each client gets its text, complete and once. All stages hold what the coordinator assumes, and nothing is left at the
end. `World.check` asserts the contract of every state, `World.check_end` that of every end.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.planning.capacity import Capacity
from coordinator.schedule import prefix_cache
from coordinator.schedule.prompts import Limits
from coordinator.schedule.request import GenerationRequest
from coordinator.schedule.scheduler import Scheduler
from tests.support.protocol.model import PROMPT, ROOM, Scheduled, Walk, World, explore
from tests.support.stages import token_stages
from tests.support.stages.token_stages import truth

MAX_STATES = 10**6


def scheduled(
    stages: int,
    lengths: tuple[int, ...],
    *,
    leaves: int = 0,
    crashes: int = 0,
    room: Capacity = ROOM,
    prompt: int = PROMPT,
    chunk: int = 1,
    mtp: str = "1",
    stop: int | None = None,
    clients: str = "",
    grouped: bool = False,
) -> Walk:
    """Walk the real scheduler with requests of `lengths` tokens, `leaves` leaving clients and `crashes` crashes.

    The text of each sequence stops after `stop` tokens. `clients` has a letter for the client of each request. With
    `grouped` a group of two holds each stage.
    """
    limits = Limits(64, prefill_chunk=chunk, step_tokens=2 * chunk)
    scheduler = Scheduler(limits, Controller(MtpMode.parse(mtp)))
    stops = (
        frozenset(truth(i, prompt + stop + 1)[-1] for i in range(2))
        if stop is not None
        else frozenset()
    )
    requests = tuple(
        GenerationRequest(tuple(truth(i, prompt)), n, stop_tokens=stops, client=clients[i : i + 1])
        for i, n in enumerate(lengths)
    )
    coordinator = Scheduled(scheduler, requests, leaves, room)
    return explore(World.start(coordinator, stages, crashes, grouped=grouped), MAX_STATES)


CASES = [
    (2, (3, 3), 0, 0),
    (3, (3, 2), 0, 0),
    (2, (3, 2), 0, 1),
    (2, (3, 2), 1, 0),
    (1, (2, 1), 1, 1),
]
LONG = [
    (3, (3, 2), 1, 0),
    (1, (3, 1), 1, 1),
    (2, (3, 2), 1, 1),
    (3, (3, 3), 0, 2),
    (2, (4, 4), 0, 1),
]
FILLED = [(2, (5,), 0, 0), (3, (5,), 0, 0), (2, (5,), 1, 0), (2, (4,), 0, 1), (2, (4, 3), 0, 0)]


@pytest.mark.parametrize(
    ("stages", "lengths", "leaves", "crashes", "mtp"),
    [
        *((*case, "1") for case in CASES),
        *((*case, "filled") for case in FILLED),
        *(
            pytest.param(*case, "1", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
            for case in LONG
        ),
    ],
)
def test_the_scheduler_over_stages(
    stages: int, lengths: tuple[int, ...], leaves: int, crashes: int, mtp: str
) -> None:
    """Pipelined chunked prefill, micro-batches, leaving clients and crashes keep the contract.

    A filled pipeline has a window of one sequence for every stage, and all but the first are speculative.
    Misspeculations, ends of texts, leaving clients and crashes occur while windows are in flight.
    """
    walk = scheduled(stages, lengths, leaves=leaves, crashes=crashes, mtp=mtp)
    print(walk)
    assert walk.met["submit"] and walk.met["pass"]
    assert stages == 1 or walk.met["News"]
    assert (walk.met["leave"] > 0, walk.met["crash,"] > 0) == (leaves > 0, crashes > 0)


@pytest.mark.parametrize(
    ("stages", "lengths", "leaves", "crashes", "mtp"),
    [
        (1, (3, 2), 1, 0, "1"),
        pytest.param(2, (3, 2), 1, 0, "1", marks=pytest.mark.thorough),
        (2, (3,), 0, 1, "filled"),
        pytest.param(2, (4,), 1, 1, "filled", marks=pytest.mark.slow),
        (1, (4,), 1, 1, "off"),
        (2, (4,), 1, 0, "off"),
    ],
)
def test_the_members_of_a_group_run_the_same_rows(
    stages: int, lengths: tuple[int, ...], leaves: int, crashes: int, mtp: str
) -> None:
    """Signals reach the first member of a group at any time, and the other members run what it has decided."""
    walk = scheduled(stages, lengths, leaves=leaves, crashes=crashes, mtp=mtp, grouped=True)
    print(walk)
    assert walk.met["pass"] and (walk.met["News"] or stages == 1)


@pytest.mark.parametrize(
    ("lengths", "leaves", "crashes", "stop"),
    [((4,), 1, 1, None), ((5,), 1, 0, 2), ((4, 3), 0, 0, 2), ((3, 3), 1, 0, 2), ((4,), 0, 1, 3)],
)
def test_a_single_stage_runs_ahead(
    lengths: tuple[int, ...], leaves: int, crashes: int, stop: int | None
) -> None:
    """A stage continues with tokens that the coordinator does not know yet, and the contract holds.

    Stop tokens, limits, leaving clients and crashes occur while a window continues another. The stage begins a frame
    before or after it has finished the frame before.
    """
    walk = scheduled(1, lengths, leaves=leaves, crashes=crashes, mtp="off", stop=stop)
    print(walk)
    assert walk.met["ahead"]


@pytest.mark.parametrize(
    ("stages", "lengths", "leaves", "crashes", "stop"),
    [(2, (3,), 1, 1, None), (2, (5,), 1, 0, 2), (2, (5, 4), 0, 0, 3), (3, (5,), 1, 0, 2)],
)
def test_stages_run_ahead_with_relayed_tokens(
    stages: int, lengths: tuple[int, ...], leaves: int, crashes: int, stop: int | None
) -> None:
    """The first stage continues with tokens that the last stage relays, and the contract holds.

    Relayed tokens arrive before or after the frame that continues with them, and before or after the outcome. With two
    sequences each stage has a micro-batch of its own.
    """
    room = replace(ROOM, sequences=4)  # both micro-batches run ahead
    walk = scheduled(
        stages, lengths, leaves=leaves, crashes=crashes, room=room, mtp="off", stop=stop
    )
    print(walk)
    assert walk.met["relay"]


def test_a_prompt_in_one_chunk() -> None:
    """Window numbers exceed those of a rebuilt sequence's chunks.

    The drafts of a window are not confused with those of a chunk.
    """
    print(scheduled(2, (4,), crashes=2, chunk=8))
    print(scheduled(1, (3, 3), crashes=1, chunk=8))


def test_prefix_entries_are_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """While clients leave, every stage has the same entries, and they hold the right text."""
    monkeypatch.setattr(prefix_cache, "SMALLEST_ENTRY", 1)
    monkeypatch.setattr(prefix_cache, "BLOCK", 1)
    monkeypatch.setattr(token_stages, "first_token", lambda _: 20)
    room = Capacity(sequences=1, kv_tokens=64, prefix_bytes=4, token_bytes=1)
    walk = scheduled(2, (1, 1), leaves=1, room=room, prompt=3)
    print(walk)
    assert walk.met["leave"]
