"""A generator over several stages in this process, without sockets, which the product serves as one stage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.pipeline.local_pipeline import LocalModel, LocalPipeline, LocalPipelines
from coordinator.pipeline.pipeline import PipelineSource, longest_prefix
from coordinator.planning.capacity import model_costs
from coordinator.planning.plan import NodeSpec, make_plan
from coordinator.schedule.admission import Limits
from coordinator.schedule.local_generator import effective_mtp_mode
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.scheduler import Scheduler
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.frame import Frame
from proto.frame_stamps import FrameStamps
from proto.kernels import Kernels
from proto.span import Span
from proto.stage_options import MachineOptions, StageOptions
from proto.terminal.progress import OnProgress
from worker.disk.block_index import BlockIndex
from worker.engine.frame_engine import FrameEngine
from worker.engine.prefix_disk import StagePrefixes, open_index
from worker.engine.stage_backups import ReceivedBackup
from worker.engine.stage_state import relayed_tokens

FRAME_SECONDS = 300.0
"""Seconds. Deadline of a frame, which test machines never reach."""


class ChainedPipeline(LocalPipeline):
    """A pipeline over a stage for each of `spans`, one after the other on one thread."""

    def __init__(self, model: LocalModel, spans: Sequence[Span], epoch: int, disk: BlockIndex | None) -> None:
        super().__init__(model, epoch, disk=disk)
        self.stages = len(spans)
        self._spans = spans
        self._engines: list[FrameEngine] = []

    def _load(self, on_progress: OnProgress | None) -> None:
        model, last = self._model, self.stages - 1
        for i, span in enumerate(self._spans):
            spec = replace(model.spec(), span=span, first=i == 0, last=i == last)
            loaded = self.host.load(lambda: model.checkpoint, spec, on_progress)
            self._engines.append(self.host.make_engine(loaded, self.epoch))

    def _process(self, frame: Frame, own: FrameStamps, stamps: FrameStamps) -> None:
        if not self._engines:
            return
        self.thread.expect(FRAME_SECONDS)
        try:
            for engine in self._engines:
                frame = engine.process(frame)
            if (message := relayed_tokens(frame)) is not None:
                self._engines[0].receive_tokens(message)
        except Exception as error:
            self._engine_failed(own, error)
        else:
            self.thread.post(self._queue_result, own, frame)

    def _engine_failed(self, own: FrameStamps, error: Exception) -> None:
        self._engines = []
        super()._engine_failed(own, error)

    def _drop_engine(self) -> None:
        for engine in self._engines:
            engine.end_plan()
        self._engines = []
        super()._drop_engine()

    async def _receive_backup(self, seq_id: int, backup: ReceivedBackup) -> None:
        for engine in self._engines:
            await self.thread.call(partial(engine.receive_backup, seq_id, backup))

    @property
    def has_disk(self) -> bool:
        return len(self._disks) == self.stages

    async def find_prefix(self, tokens: Sequence[int]) -> int:
        return longest_prefix(await asyncio.gather(*(disk.find(tokens) for disk in self._disks)))

    async def load_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        for engine, disk in zip(self._engines, self._disks, strict=True):
            async for part in disk.load(tokens):
                await self.thread.call(partial(engine.receive_backup, seq_id, part))

    @property
    def _disks(self) -> list[StagePrefixes]:
        return [engine.disk for engine in self._engines if engine.disk is not None]


class ChainedPipelines(PipelineSource):
    """A source of pipelines of `stages` even stages."""

    def __init__(self, model: LocalModel, stages: int, disk: BlockIndex | None) -> None:
        nodes = [NodeSpec(f"node {number}", 2**60) for number in range(stages)]
        plan = make_plan(model_costs(model.checkpoint), nodes)
        self._spans = [stage.span for stage in plan.stages]
        self._model, self._disk, self._epoch = model, disk, 0

    async def acquire(self) -> ChainedPipeline:
        """Return a pipeline that is loaded."""
        self._epoch += 1
        pipeline = ChainedPipeline(self._model, self._spans, self._epoch, self._disk)
        await pipeline.start()
        return pipeline


@asynccontextmanager
async def local_stages(
    checkpoint: Checkpoint,
    *,
    stages: int = 1,
    mtp: MtpMode | None = None,
    state: Path | None = None,
    prefix_disk: int | None = None,
    limits: Limits | None = None,
    vocabulary: bytes = b"",
    **options: Any,
) -> AsyncIterator[GenerationLoop]:
    """Load `checkpoint` in `stages` even stages, and serve requests until the block is left.

    With `prefix_disk` bytes, prefixes stay in the directory `state`. Requests with a grammar need the packed
    `vocabulary`. `options` are fields of StageOptions and LocalModel, and `kernels`.
    """
    mode = effective_mtp_mode(checkpoint, mtp or MtpMode())
    known = [f.name for f in fields(StageOptions)]
    stage = StageOptions(with_head=mode.depth != 0, **{name: options.pop(name) for name in known if name in options})
    machine = MachineOptions(kernels=options.pop("kernels", Kernels.auto))
    model = LocalModel(checkpoint, stage, machine, **options)
    source: PipelineSource = LocalPipelines(model, state, prefix_disk)
    if stages > 1:
        source = ChainedPipelines(model, stages, open_index(state, prefix_disk))
    limits = limits or Limits(checkpoint.config.max_positions, checkpoint.config.vocab_size)
    loop = GenerationLoop(source, Scheduler(limits, Controller(mode), vocabulary))
    try:
        await loop.start()
        yield loop
    finally:
        await loop.close()
