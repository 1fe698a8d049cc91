"""Long texts: what a frame costs the scheduler does not grow with the text, and nothing is kept of returned frames."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import numpy as np
import pytest

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.drafts.prompt_lookup import NgramMode
from coordinator.planning.capacity import Capacity
from coordinator.schedule.admission import Limits
from coordinator.schedule.request import GenerationRequest
from coordinator.schedule.scheduler import Scheduler
from proto.frame import Frame, Outcome

LONG = 100_000
"""Tokens of a long text."""

LIMITS = Limits(context=2 * LONG, prefill_chunk=512, step_tokens=2048)
ROOM = Capacity(sequences=4, kv_tokens=4 * LONG, prefix_bytes=0)

FRAMES = 1_000
"""Frames of one measurement."""

GROWTH = 2.5
"""Factor. One copy of 100,000 tokens takes 200 us or more, and a frame without one about 150."""

ROUNDS = 2
"""Measurements of each length, in turns, since other programs slow a machine for seconds."""

OBJECTS = FRAMES // 2
"""Live objects that may come and go."""

MODES = [("off", 1, NgramMode.off), ("off", 2, NgramMode.auto), ("2", 1, NgramMode.auto)]


def answered(frame: Frame, stages: int) -> Frame:
    """Return a frame whose windows have their first token accepted, so that drafts never help."""
    outcomes = []
    for segment in frame.segments:
        accepted = 1 if segment.open else segment.width
        token = (segment.position + accepted) * 2654435761 % 2**31  # no part of it repeats
        chosen = token if segment.sample else None
        drafts = tuple(range(segment.drafts))
        outcomes.append(Outcome(segment.seq_id, segment.window, accepted, chosen, drafts))
    return replace(frame, outcomes=tuple(outcomes), stage_us=(1000,) * stages)


def generate(mtp: str, stages: int, ngram: NgramMode, prompt: int, tokens: int) -> list[float]:
    """Return the seconds of each frame of an answer. Assert that nothing is kept of them."""
    scheduler = Scheduler(LIMITS, Controller(MtpMode.parse(mtp), ngram=ngram))
    scheduler.reset(stages, 1, ROOM, 0.0)
    scheduler.submit(GenerationRequest(tuple(range(prompt)), tokens), 0.0)
    in_flight: list[Frame] = []
    times: list[float] = []
    objects: list[int] = []
    now = 0.0
    while scheduler.running or scheduler.waiting:
        began = time.thread_time()
        while (frame := scheduler.next_frame(now)) is not None:
            in_flight.append(frame)
        back, now = answered(in_flight.pop(0), stages), now + 0.01
        scheduler.apply_outcomes(back, now)
        times.append(time.thread_time() - began)
        if len(times) % FRAMES == 0:
            objects.append(len(gc.get_objects()))
    assert max(objects) - objects[0] < OBJECTS, objects
    return times


def fast(times: list[float]) -> float:
    """Return the seconds that a tenth of the frames stay below: a copy slows every frame, another program some."""
    return float(np.quantile(times, 0.1))


@pytest.mark.parametrize(("mtp", "stages", "ngram"), MODES)
def test_a_frame_costs_the_same_after_a_long_prompt(mtp: str, stages: int, ngram: NgramMode) -> None:
    """A fast frame after 100,000 tokens is as fast as after 100."""
    seconds: dict[int, float] = {}
    for _ in range(ROUNDS):
        for prompt in (100, LONG):
            frames = generate(mtp, stages, ngram, prompt, 3 * FRAMES)[-FRAMES:]
            seconds[prompt] = min(fast(frames), seconds.get(prompt, float("inf")))
    assert seconds[LONG] < GROWTH * seconds[100], seconds


@pytest.mark.slow
def test_the_end_of_a_long_answer_is_as_fast_as_its_beginning() -> None:
    """An answer of 100,000 tokens leaves no chain of frames behind."""
    times = generate("off", 1, NgramMode.off, 100, LONG)
    assert len(times) >= LONG
    assert fast(times[-FRAMES:]) < GROWTH * fast(times[FRAMES : 2 * FRAMES])
