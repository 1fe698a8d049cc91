"""The parts of a server that belong to one model: checkpoint, tokenizer, generation loop and app."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from coordinator.api.app import create_app
from coordinator.api.request.context import ApiOptions
from coordinator.api.stored.stored_answers import StoredAnswers
from coordinator.cluster.manager import ClusterManager
from coordinator.generation.limits import Limits
from coordinator.generation.loop import GenerationLoop
from coordinator.generation.scheduler import Scheduler
from coordinator.journal.journal import Journal
from coordinator.local_engine.generator import effective_mtp_mode
from coordinator.models.admin import ModelAdmin
from coordinator.models.catalog import quantization_text
from coordinator.models.loader import ModelLoader
from coordinator.pipeline.base import PipelineSource
from coordinator.pipeline.local import LocalPipelines
from coordinator.server.live_status import LiveStatus
from coordinator.server.model_parts import local_model, served_name, why_not_alone
from coordinator.server.model_status import model_status
from coordinator.server.options import ServeOptions
from coordinator.server.trace_report import trace_report
from coordinator.text.model_info import ModelInfo, generation_defaults
from coordinator.text.output_format import GrammarCompiler
from coordinator.text.tokenizer import Tokenizer
from coordinator.trust.invitation import Invitation
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.depth.controller import Controller
from proto.errors import ClusterError


@dataclass(frozen=True)
class LastingParts:
    """The parts of a server that outlive its model. `manager` is None in single-node mode."""

    api_options: ApiOptions
    journal: Journal
    manager: ClusterManager | None
    admin: ModelAdmin
    switch: ModelLoader
    invite: Callable[[], Invitation] | None


class OpenedModel:
    """A model whose files are open: everything that can be known before its weights are read.

    The constructor blocks for the disk. It raises CheckpointError for a model that cannot be served.
    """

    def __init__(self, options: ServeOptions, path: Path) -> None:
        self.options = options
        self.checkpoint = Checkpoint.open(path)
        self.name = served_name(options.model)
        self.mode = effective_mtp_mode(self.checkpoint, options.mtp)
        config = self.checkpoint.config
        self.tokenizer = Tokenizer.load(self.checkpoint.path, config.eos_token_ids)
        self.tokenizer.limit_tokens(config.max_positions)
        self.vocabulary = GrammarCompiler(self.tokenizer).vocabulary
        self.info = ModelInfo(
            self.name,
            config.max_positions,
            replace(generation_defaults(path), acceptance=options.acceptance),
            options.served_names,
            fingerprint=self.checkpoint.fingerprint(),
            family=config.model_type,
            quantization=quantization_text(self.checkpoint),
        )
        self.local = LocalPipelines(local_model(self.checkpoint, options, self.mode))
        self.why_not_alone = why_not_alone(self.local.model)


class ServedParts:
    """The generation loop and the app of an opened model, made on the event loop. The owner calls `close`."""

    def __init__(self, model: OpenedModel, source: PipelineSource, lasting: LastingParts) -> None:
        self.model = model
        config, options = model.checkpoint.config, model.options
        limits = Limits(
            config.max_positions,
            config.vocab_size,
            prefill_chunk=options.prefill_chunk or LocalPipelines.default_prefill_chunk(),
            step_tokens=options.step_tokens,
        )
        self.loop = GenerationLoop(
            source, Scheduler(limits, Controller(model.mode), model.vocabulary)
        )
        self._sensors = asyncio.create_task(model.local.sensors.refresh(), name="sensors")
        manager, admin = lasting.manager, lasting.admin
        self.app = create_app(
            self.loop,
            model.tokenizer,
            model.info,
            LiveStatus(
                self.loop,
                manager,
                model.name,
                model.local.status,
                model_status(model.checkpoint),
                lambda: model.local.sensors.latest,
                lambda: tuple(admin.jobs.jobs),
            ),
            lasting.api_options,
            replan=manager.replan if manager else None,
            frames=self.loop.frames,
            collect_trace=partial(trace_report, self.loop),
            journal=lasting.journal,
            model_admin=admin,
            model_loader=lasting.switch,
            invite=lasting.invite,
        )
        self.stored_answers: StoredAnswers = self.app.state.stored_answers

    async def start(self) -> None:
        """Wait for the first plan."""
        await self.loop.start()

    def count_answers(self) -> int:
        """Return the number of answers that run or wait."""
        snapshot = self.loop.snapshot()
        return len(snapshot.requests) + snapshot.waiting

    def end_pages(self) -> None:
        """End the event streams of open pages."""
        self.app.state.live_feed.close()

    async def close(self, error: ClusterError | None = None) -> None:
        """End all answers with `error`. Without it stored answers continue at the next start."""
        if error is None:
            await self.stored_answers.suspend()
        else:
            await self.stored_answers.fail_all(error)
        await self.loop.close("the server is shutting down" if error is None else error.public)
        self._sensors.cancel()
