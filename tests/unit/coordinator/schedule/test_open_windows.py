"""The memory for a second open window of every admitted sequence."""

from __future__ import annotations

import pytest

from coordinator.planning.capacity import Capacity
from coordinator.schedule.request import GenerationRequest
from coordinator.schedule.scheduler import KV_STEP, may_run_ahead
from coordinator.schedule.sequence import Sequence
from proto.params import SamplingParams


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
