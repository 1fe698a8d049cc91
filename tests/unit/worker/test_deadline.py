"""The deadline of a frame is estimated from earlier frames of the same size or of other sizes."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import ProtocolError
from proto.frame import Admit, Evict, Frame, Segment
from proto.frame_stamps import FrameStamps, StageStep
from proto.span import Span
from proto.stage_options import StageOptions
from tests.support.checkpoints.checkpoints import write_checkpoint
from worker.disk.block_index import BlockIndex
from worker.engine.engine_thread import EngineThread
from worker.engine.frame_engine import BegunFrame, FrameEngine
from worker.engine.frame_times import (
    FIRST_SECONDS,
    GROUP_SECONDS,
    NEW_SIZE_SECONDS,
    SETTLED_FRAMES,
    SLACK,
    TRIED_FRAMES,
    DeadlineEstimate,
    Lead,
)
from worker.engine.host import EngineHost, LoadedStage, StageSpec


def frame(rows: int, position: int = 0) -> Frame:
    """Return a frame with one sequence of `rows` rows, which ends at `position + rows`."""
    return Frame(1, 0, segments=(Segment(1, 0, position, tuple(range(rows))),))


@pytest.mark.parametrize(("ahead", "in_turn"), [(4e-3, 5e-3), (7e-3, 5e-3)])
def test_a_group_keeps_to_the_faster_way(ahead: float, in_turn: float) -> None:
    """Both ways are tried for a few frames, also where single frames are slow, and now and then again."""
    lead, taken = Lead(), Counter[bool]()
    for frame in range(4 * SETTLED_FRAMES):
        taken[lead.ahead] += 1
        lead.record_interval((ahead if lead.ahead else in_turn) + 0.1 * (frame % 5 == 0))
    assert taken[ahead > in_turn] in range(2 * TRIED_FRAMES, 8 * TRIED_FRAMES)


def test_the_first_frame_has_the_longest_deadline() -> None:
    """The first frame has the longest deadline, because the machine's speed is not known yet."""
    assert DeadlineEstimate().seconds(frame(1)) == FIRST_SECONDS


def test_the_deadline_follows_the_frames_of_that_size() -> None:
    """A frame size that is slower than any timeout gets a longer deadline, and one outlier changes it a little."""
    deadline_estimate = DeadlineEstimate()
    deadline_estimate.record_frame_time(frame(512), 8.0)
    assert deadline_estimate.seconds(frame(512)) == SLACK * 8.0
    deadline_estimate.record_frame_time(frame(512), 13.0)
    assert deadline_estimate.seconds(frame(512)) == pytest.approx(SLACK * 9.0)


def test_a_new_size_is_estimated_from_known_sizes() -> None:
    """A new frame size gets a bounded deadline from the sizes seen so far.

    More rows allow proportionally more time, and fewer rows allow no more than a large frame had. Each includes time to
    compile kernels.
    """
    deadline_estimate = DeadlineEstimate()
    deadline_estimate.record_frame_time(frame(1, position=7), 0.01)
    assert deadline_estimate.seconds(frame(4, position=4)) >= NEW_SIZE_SECONDS + SLACK * 0.01 * 4
    assert deadline_estimate.seconds(frame(512)) == FIRST_SECONDS
    deadline_estimate.record_frame_time(frame(256), 0.5)
    assert deadline_estimate.seconds(frame(128)) == NEW_SIZE_SECONDS + SLACK * 0.5


def test_no_deadline_is_below_the_least() -> None:
    """`least` is the shortest deadline of any frame, for backends that compile kernels. Slower frames may exceed it."""
    deadline_estimate = DeadlineEstimate(least=120.0)
    assert deadline_estimate.seconds(frame(1)) == 120.0
    deadline_estimate.record_frame_time(frame(1), 0.1)
    assert deadline_estimate.seconds(frame(1)) == deadline_estimate.seconds(frame(8)) == 120.0
    deadline_estimate.record_frame_time(frame(512), 40.0)
    assert deadline_estimate.seconds(frame(512)) == SLACK * 40.0


async def test_a_frame_of_a_group_has_time_for_the_other_members() -> None:
    """A member waits in its sums while another one is slow, so the times of its own frames say little."""
    host, given = EngineHost(), list[float]()
    host._times.deadlines.record_frame_time(frame(1), 0.01)
    with patch.object(EngineThread, "expect", lambda _, seconds: given.append(seconds)):
        for size in (1, 2):
            engine: Any = MagicMock()
            engine.group.size, engine.begin.side_effect = size, ProtocolError("a bad frame")
            host.run_frame(engine, frame(1), MagicMock(), MagicMock(), MagicMock())
    assert given == [SLACK * 0.01, GROUP_SECONDS]
    await host.close()


@pytest.fixture
async def host(tmp_path: Path) -> Any:
    """Return a host with a disk."""
    host = EngineHost(BlockIndex(tmp_path / "prefixes", 2**30))
    yield host
    await host.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two models. The tests make the second one slow."""
    return [write_checkpoint(tmp_path_factory.mktemp("model"), layers=4, seed=seed) for seed in (1, 2)]


async def load(host: EngineHost, path: Path) -> LoadedStage:
    """Load all layers of a model."""
    spec = StageSpec(Span(0, 4), True, True, StageOptions("float32"))
    return await host.thread.call(lambda: host.load(lambda: Checkpoint.open(path), spec, None))


async def run_prompts(host: EngineHost, engine: FrameEngine, *lengths: int) -> float:
    """Run prompts, one after the other. Return the longest time past a deadline, in seconds."""
    stalls, errors, ended = [0.0], list[Exception](), threading.Event()
    for number, length in enumerate(lengths, engine.frames_done):
        ended.clear()
        ops = (*((Evict(number - 1),) if number else ()), Admit(number, length + 8, length))
        prompt = Frame(engine.epoch, number, ops, (Segment(number, 0, 0, (7,) * length, sample=True),))
        stamps, done = FrameStamps(0, StageStep), lambda _: ended.set()
        host.thread.submit_frame(partial(host.run_frame, engine, prompt, stamps, done, errors.append))
        while not ended.wait(0.01):
            stalls.append(host.thread.stall)
            assert not errors
        await host.thread.call(lambda: None)
    return max(stalls)


async def test_a_slower_model_has_deadlines_of_its_own(
    host: EngineHost, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of a model say nothing of the next one, whose long prompt may take a hundred times as long."""
    fast = await load(host, models[0])
    await run_prompts(host, host.make_engine(fast, 1), 1, 512)
    for _ in range(100):  # as of a fast machine
        host._times.deadlines.record_frame_time(frame(512), 0.02)
    again = host.make_engine(fast, 2)
    deadline = host._times.deadlines.seconds(frame(512))
    assert deadline < FIRST_SECONDS, "a stage in a new plan keeps its times"
    del again, fast
    slow, finish = deadline + 0.5, BegunFrame.finish_frame

    def slowly(begun: BegunFrame) -> Frame:
        """Finish a frame as a slow machine does."""
        time.sleep(slow)
        return finish(begun)

    monkeypatch.setattr(BegunFrame, "finish_frame", slowly)
    second = await load(host, models[1])
    assert await run_prompts(host, host.make_engine(second, 3), 512) == 0


async def test_a_former_stage_leaves_nothing_at_its_host(host: EngineHost, models: list[Path]) -> None:
    """After many loads a host has what it had after the first one."""
    for path in (*models, *models):
        loaded = await load(host, path)
    gc.collect()
    assert [*host._stage_prefixes.values()] == [loaded.prefixes]
