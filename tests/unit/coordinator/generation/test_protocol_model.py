"""In every order in which frames, signals, clients and crashes can come, each client hears its text, once and whole,
all stages hold what the coordinator thinks they hold, and in the end nothing is left.

What holds in every state is in `World.check`, and at every end in `World.check_end`.
"""

from __future__ import annotations

import pytest

from coordinator.generation import prefix_cache
from coordinator.generation.limits import Limits
from coordinator.generation.request import GenerationRequest
from coordinator.generation.scheduler import Scheduler
from coordinator.planning.capacity import Capacity
from mtp.depth.controller import Controller, MtpMode
from tests.support.protocol.coordinators import PROMPT, ROOM, Hopeful, Scheduled
from tests.support.protocol.model import Walk, World, explore
from tests.support.stages import token_stages
from tests.support.stages.token_stages import copies, truth
from worker.engine import stage_engine as engine

MOST_STATES = 10**6


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
) -> Walk:
    """The real scheduler: requests for so many tokens, `leaves` clients that may go away, `crashes` of the plan."""
    limits = Limits(64, prefill_chunk=chunk, step_tokens=2 * chunk)
    scheduler = Scheduler(limits, Controller(MtpMode.parse(mtp)))
    requests = tuple(GenerationRequest(tuple(truth(i, prompt)), n) for i, n in enumerate(lengths))
    coordinator = Scheduled(scheduler, requests, leaves, room)
    return explore(World.start(coordinator, stages, crashes), MOST_STATES)


def hopeful(stages: int, lengths: tuple[int, ...], *, crashes: int = 0) -> Walk:
    """Two open windows a sequence, the second on hope; texts of so many tokens."""
    return explore(World.start(Hopeful.of(*lengths), stages, crashes), MOST_STATES)


@pytest.mark.parametrize(
    ("stages", "lengths", "leaves", "crashes"),
    [(2, (3, 3), 0, 0), (3, (3, 2), 0, 0), (2, (3, 2), 0, 1), (2, (3, 2), 1, 0), (1, (2, 1), 1, 1)],
)
def test_the_scheduler_over_stages(
    stages: int, lengths: tuple[int, ...], leaves: int, crashes: int
) -> None:
    """Convoys of prompt chunks, lanes of windows, clients that leave, plans that end: as `mtp-coord` does it."""
    walk = scheduled(stages, lengths, leaves=leaves, crashes=crashes)
    print(walk)
    assert walk.met["submit"] and walk.met["pass"]
    assert stages == 1 or walk.met["News"]
    assert (walk.met["leave"] > 0, walk.met["crash,"] > 0) == (leaves > 0, crashes > 0)


@pytest.mark.parametrize(
    ("stages", "lengths", "leaves", "crashes"),
    [(2, (5,), 0, 0), (3, (5,), 0, 0), (2, (5,), 1, 0), (2, (4,), 0, 1), (2, (4, 3), 0, 0)],
)
def test_the_scheduler_fills_the_stages(
    stages: int, lengths: tuple[int, ...], leaves: int, crashes: int
) -> None:
    """The real scheduler with a window of one sequence for every stage, each sent on hope: hopes that fail, texts that
    end, clients that leave and plans that end while windows are in flight."""
    walk = scheduled(stages, lengths, leaves=leaves, crashes=crashes, mtp="filled")
    print(walk)
    assert walk.met["News"]


def test_a_prompt_in_one_chunk() -> None:
    """Window numbers pass those of a rebuilt sequence's chunks; a window's drafts are not taken for a chunk's."""
    print(scheduled(2, (4,), crashes=2, chunk=8))
    print(scheduled(1, (3, 3), crashes=1, chunk=8))


@pytest.mark.parametrize(
    ("stages", "lengths", "crashes"),
    [(2, (6, 3), 0), (3, (5,), 1), (1, (6,), 0)],
)
def test_windows_opened_on_hope(stages: int, lengths: tuple[int, ...], crashes: int) -> None:
    """Two windows of a sequence are open at once, and a rejection of the first dooms the second, wherever it is."""
    walk = hopeful(stages, lengths, crashes=crashes)
    print(walk)
    assert walk.met["send"] and (stages == 1 or walk.met["News"])


def test_prefix_entries_are_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are made, used and dropped while clients leave: every stage has the same entries, of the true text."""
    monkeypatch.setattr(prefix_cache, "SMALLEST_ENTRY", 1)
    monkeypatch.setattr(prefix_cache, "BLOCK", 1)
    monkeypatch.setattr(engine, "copies_of", copies)
    monkeypatch.setattr(token_stages, "first_token", lambda _: 20)
    room = Capacity(sequences=1, kv_tokens=64, prefix_bytes=4, token_bytes=1)
    walk = scheduled(2, (1, 1), leaves=1, room=room, prompt=3)
    print(walk)
    assert walk.met["leave"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("stages", "lengths", "leaves", "crashes"),
    [(3, (3, 2), 1, 0), (1, (3, 1), 1, 1), (2, (3, 2), 1, 1), (3, (3, 3), 0, 2), (2, (4, 4), 0, 1)],
)
def test_the_scheduler_over_stages_at_length(
    stages: int, lengths: tuple[int, ...], leaves: int, crashes: int
) -> None:
    """More of `test_the_scheduler_over_stages`."""
    print(scheduled(stages, lengths, leaves=leaves, crashes=crashes))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("stages", "lengths", "crashes"), [(3, (7,), 1), (3, (5, 5), 0), (2, (6, 4), 0)]
)
def test_windows_opened_on_hope_at_length(
    stages: int, lengths: tuple[int, ...], crashes: int
) -> None:
    """More of `test_windows_opened_on_hope`."""
    print(hopeful(stages, lengths, crashes=crashes))
