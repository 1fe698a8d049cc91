"""A checkpoint that announces a head and lacks its tensors: one message per process, and answers without drafts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.schedule.request import GenerationRequest
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import WorkerLostError
from tests.conftest import Checkpoints
from tests.support.processes.in_process_coordinator import running_coordinator
from worker.node.node import Identity, LocalModels, WorkerNode
from worker.node.process import served


@asynccontextmanager
async def worker(model: Path) -> AsyncIterator[str]:
    """Return the address of a worker in this process."""
    models = LocalModels(model)
    await asyncio.to_thread(models.open, model)
    node = WorkerNode(Identity("w", None, 2**32, models, bytes_per_second=1e11))
    async with served(node, "127.0.0.1") as port:
        yield f"127.0.0.1:{port}"
    await node.close()


@pytest.mark.parametrize(
    ("announced", "head", "told"),
    [(True, False, (1, 1)), (False, False, (0, 1)), (True, True, (0, 0))],
    ids=["lost", "never had one", "whole"],
)
async def test_a_missing_head_is_reported_once(
    checkpoints: Checkpoints,
    caplog: pytest.LogCaptureFixture,
    announced: bool,
    head: bool,
    told: tuple[int, int],
) -> None:
    """The worker and the coordinator each report a missing head once, for any number of plans."""
    model = checkpoints(mtp=head, announce_mtp=announced)
    assert Checkpoint.open(model).mtp.complete is head
    with caplog.at_level(logging.INFO):
        async with (
            worker(model) as address,
            running_coordinator(model, [address], mtp="off") as over,
        ):
            answer = await over.answer(GenerationRequest((1, 2, 3), 4))
            assert len(answer.tokens) == 4
            epoch = over.view.epoch
            assert over.loop.pipeline is not None
            over.manager.report_failure(over.loop.pipeline, WorkerLostError("for another plan"))
            await over.until(lambda: over.view.epoch > epoch, "another plan")
            await over.served_by(address)
    heard = [r.name.partition(".")[0] for r in caplog.records if r.message.startswith("no MTP")]
    assert (heard.count("worker"), heard.count("coordinator")) == told
