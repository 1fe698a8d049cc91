"""The stage of the next model: loaded between frames beside the stage in force, and used by a later Load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from typing import Any
from unittest.mock import MagicMock

import pytest

from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.head.draft_vocabulary import DraftVocabularySize
from proto import cluster_pb2 as pb
from proto.errors import MemoryLimitError, StaleEpochError
from proto.span import Span
from worker.node import stage_ahead
from worker.node.loading import LoadedStage, stage_steps
from worker.node.node import WorkerNode
from worker.node.stage_key import StageKey

ME = pb.Coordinator(id="c", name="c")
PATIENCE = 20.0
"""Seconds. Deadline of events that should happen at once."""


class Steps:
    """A fake `stage_steps` that goes on as long as `endless` is set."""

    def __init__(self) -> None:
        self.taken = 0
        self.endless = False
        self.closed = False

    def __call__(
        self, identity: Any, checkpoint: Any, key: StageKey, **_: Any
    ) -> Generator[str, None, LoadedStage]:
        """Yield steps without reading anything."""
        try:
            while self.endless or self.taken < 3:
                self.taken += 1
                yield ""
            return LoadedStage(key, MagicMock(), 7)
        finally:
            self.closed = True


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    found = Steps()
    monkeypatch.setattr(stage_ahead, "stage_steps", found)
    return found


@pytest.fixture
async def node(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerNode]:
    monkeypatch.setattr(
        "worker.node.node.read_stage",
        lambda identity, model, key, **_: LoadedStage(key, MagicMock(), 1),
    )
    identity: Any = MagicMock()
    identity.configure_mock(name="w", wired=False)
    identity.models.find.return_value.part_bytes.return_value = {"layers.0": 1}
    node = WorkerNode(identity)
    yield node
    steps.endless = False
    await node.close()


def request(epoch: int, start: int, *, ahead: bool = False) -> pb.LoadRequest:
    """Return the Load of the stage with one layer that begins at `start`."""
    span = pb.Span(start=start, end=start + 1)
    return pb.LoadRequest(coordinator=ME, epoch=epoch, span=span, lease_ms=60_000, ahead=ahead)


async def load(node: WorkerNode, wanted: pb.LoadRequest) -> pb.LoadResult:
    """Load a stage, with a deadline."""
    async with asyncio.timeout(PATIENCE):
        return await node.load(wanted, lambda done, total: None)


async def test_a_later_load_uses_the_stage(node: WorkerNode, steps: Steps) -> None:
    """The present stage and its epoch stay until a Load of the same stage, which reads nothing."""
    await load(node, request(5, 0))
    assert (await load(node, request(5, 1, ahead=True))).weight_bytes == 7
    assert node.loaded is not None
    assert (node.loaded.key.span, node.epoch) == (Span(0, 1), 5)
    await load(node, request(5, 1, ahead=True))
    assert steps.taken == 3, "a stage that is loaded is not loaded again"
    assert (await load(node, request(6, 1))).weight_bytes == 7
    assert node.loaded.key.span == Span(1, 2)
    assert (await load(node, request(7, 0))).weight_bytes == 1
    assert (await load(node, request(8, 1))).weight_bytes == 1, "a taken stage is not kept"


@pytest.mark.parametrize("by", ["load", "release"])
async def test_another_stage_or_the_end_of_the_lease_frees_it(node: WorkerNode, by: str) -> None:
    """A Load of another stage needs the memory, and so does the next coordinator."""
    await load(node, request(5, 1, ahead=True))
    if by == "release":
        node.release()
    else:
        await load(node, request(6, 0))
    assert (await load(node, request(7, 1))).weight_bytes == 1


async def test_a_worker_outside_the_plan_frees_its_old_stage(
    node: WorkerNode, steps: Steps
) -> None:
    """The plan in force has a newer epoch than the worker, so no plan uses its stage. The same stage is kept."""
    await load(node, request(5, 0))
    await load(node, request(7, 0, ahead=True))
    assert (node.epoch, steps.taken) == (7, 0)
    assert node.loaded is not None
    await load(node, request(8, 1, ahead=True))
    assert (node.epoch, steps.taken) == (8, 3)
    assert node.loaded is None


async def test_frames_run_between_the_steps(node: WorkerNode, steps: Steps) -> None:
    """Work of the present plan waits for one step, not for the load. A new plan ends the load."""
    steps.endless = True
    task = asyncio.create_task(load(node, request(5, 1, ahead=True)))
    async with asyncio.timeout(PATIENCE):
        for _ in range(5):
            before = steps.taken
            await node.machinery.thread.call(lambda: None)
            while steps.taken == before:  # noqa: ASYNC110 (the thread sets no event)
                await asyncio.sleep(0)
    await load(node, request(6, 0))
    with pytest.raises(StaleEpochError):
        await task
    await node.machinery.thread.call(lambda: None)
    assert steps.closed, "the weights of an unfinished load are freed"


def test_a_stage_that_does_not_fit_beside_the_memory_in_use() -> None:
    """It is refused before anything is read, with the bytes in use."""
    key = StageKey("f", Span(0, 4), True, False, "", 0, False, False, DraftVocabularySize())
    identity: Any = MagicMock()
    checkpoint = Checkpoint.open(checkpoint_dir())
    nbytes = sum(
        checkpoint.part_bytes()[part]
        for part in checkpoint.stage_parts(Span(0, 4), first=True, last=False, with_head=False)
    )
    identity.configure_mock(name="w", memory_limit=nbytes)
    for used, fits in ((0, True), (1, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("worker.node.loading.mx.get_active_memory", lambda used=used: used)
            steps = stage_steps(
                identity, checkpoint, key, expect=print, on_progress=print, beside=True
            )
            if fits:
                next(steps)
            else:
                with pytest.raises(MemoryLimitError, match="beside 1 bytes in use"):
                    next(steps)
