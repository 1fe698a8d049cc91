"""The parts of a server that belong to one model: options, checkpoint, tokenizer, cluster manager, loop and app."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.answers.journal import Journal
from coordinator.answers.stored_answers import StoredAnswers
from coordinator.cluster.manager import ClusterManager
from coordinator.cluster.membership import ManagerOptions
from coordinator.cluster.served_model import ServedModel
from coordinator.cluster.view import Settings
from coordinator.drafts.controller import Controller
from coordinator.images.encoder import ImageEncoder
from coordinator.pipeline.local_pipeline import LocalModel, LocalPipelines
from coordinator.pipeline.pipeline import PipelineSource
from coordinator.pipeline.worker_connection import ConnectionPolicy
from coordinator.schedule.admission import Limits
from coordinator.schedule.local_generator import effective_mtp_mode
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.scheduler import Scheduler
from coordinator.serve.app import create_app
from coordinator.serve.live_status import LiveStatus
from coordinator.serve.options import DEFAULT_WAIT, ServeOptions
from coordinator.status.cluster_status import ModelStatus
from coordinator.text.embedder import Embedder
from coordinator.text.tokenizer import ModelInfo, Tokenizer, generation_defaults, pack_vocabulary
from coordinator.trust.client_access import Invitation
from coordinator.web.context import Api, ApiOptions
from coordinator.web.model_catalog import ModelLoader, quantization_text
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import snapshot_of
from mtp.vision.tower import tower_bytes
from proto import cluster_pb2 as pb
from proto.errors import ClusterError, MemoryLimitError, UsageError
from proto.images import VisionMode
from proto.stage_options import MachineOptions, StageOptions
from proto.terminal.progress import format_size
from proto.trust.node_trust import NodeTrust

ASSUMED_DEPTH = 1
"""Drafts per step for which the planner charges the last stage while `--mtp auto` chooses the depth."""


def make_manager(model: OpenedModel, me: pb.Coordinator, trust: NodeTrust | None = None) -> ClusterManager:
    """Return the manager of the workers, which serves `model` in this process when no worker serves."""
    options = model.options
    settings = Settings(
        # Without --nodes the workers named by --worker are expected, but not required.
        nodes=options.required_nodes or len(options.worker) or None,
        nodes_required=options.required_nodes is not None and not options.alone_ok,
        wait=DEFAULT_WAIT if options.wait is None else options.wait,
        first_wait=math.inf if options.wait is None else options.wait,
        why_not_alone=model.why_not_alone,
    )
    manager_options = ManagerOptions(
        me,
        settings,
        options.worker,
        not options.no_mdns,
        options.failure_timeout,
        ConnectionPolicy(trust, options.insecure),
    )
    return ClusterManager(served_model(model), manager_options, model.local.make)


def served_model(model: OpenedModel) -> ServedModel:
    """Return the checkpoint with the options of every Load request."""
    checkpoint, options = model.checkpoint, model.options
    repo, revision = snapshot_of(checkpoint.path) or ("", "")
    return ServedModel(
        checkpoint,
        pb.ModelRef(
            name=options.model,
            path=str(checkpoint.path.resolve()),
            repo=repo,
            revision=revision,
            fingerprint=checkpoint.fingerprint(),
        ),
        replace(model.stage_options, with_head=options.mtp.depth != 0),
        draft_depth=ASSUMED_DEPTH if model.mode.depth is None else model.mode.depth,
        max_sequences=options.max_sequences,
        prefix_cache=not options.no_prefix_cache,
        share_weights=options.share_weights,
        parallel=options.parallel,
        fixed_depth=model.mode.depth,
    )


def why_not_alone(model: LocalModel) -> str:
    """Return why this machine cannot serve the model without workers, or an empty string. Reads headers only."""
    try:
        model.capacity()
    except MemoryLimitError as error:
        weights = format_size(sum(model.checkpoint.part_bytes().values()))
        return (
            f"no worker serves, and the model ({weights}) does not fit into this machine. Start mtp-worker on "
            f"other machines ({error})"
        )
    return ""


def served_name(model: str) -> str:
    """Return the name of the model for clients, which never contains a path of this machine."""
    is_repo = model.count("/") == 1 and not model.startswith(("/", ".", "~"))
    return model if is_repo else model.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class LastingParts:
    """The parts of a server that outlive its model. `manager` is None in single-node mode."""

    api_options: ApiOptions
    journal: Journal
    manager: ClusterManager | None
    switch: ModelLoader
    invite: Callable[[], Invitation] | None
    embedder: Embedder | None = None


class OpenedModel:
    """A model whose files are open: everything that can be known before its weights are read.

    The constructor blocks for the disk. It raises CheckpointError for a model that cannot be served, SpanError for one
    that cannot be cut into slices, and UsageError for an option that this model lacks. `other_bytes` of the memory are
    for other processes of this server.
    """

    def __init__(self, options: ServeOptions, path: Path, other_bytes: int = 0) -> None:
        self.options, self.other_bytes = options, other_bytes
        self.checkpoint = Checkpoint.open(path)
        config = self.checkpoint.config
        if options.exact:
            config.check_exact()
        if options.parallel.size != 1 and not config.shape.can_cut:
            raise UsageError(f"--parallel {options.parallel} is not supported for {config.release}. Leave it out.")
        config.kv_format(options.kv_bits)
        self.checkpoint.check_slices(options.layer_slices)
        self.name = served_name(options.model)
        self.mode = effective_mtp_mode(self.checkpoint, options.mtp, trims=bool(options.draft_vocab))
        self.tokenizer = Tokenizer.load(self.checkpoint.path, config.eos_token_ids, config.family.call_forms)
        self.tokenizer.max_tokens = config.max_positions
        self.vocabulary = pack_vocabulary(self.tokenizer)
        tokens = self.tokenizer.backend, self.tokenizer.eos_ids, config.vocab_size
        stored, drafted = (options.dtype, options.kv_bits), options.draft_vocab.resolve(*tokens)
        exact = options.exact, options.layer_slices
        self.stage_options = StageOptions(*stored, self.mode.depth != 0, *exact, drafted)
        self.info = ModelInfo(
            self.name,
            config.max_positions,
            replace(generation_defaults(path), acceptance=options.acceptance),
            options.served_model_name,
            fingerprint=self.checkpoint.fingerprint(),
            family=config.model_type,
            quantization=quantization_text(self.checkpoint),
            nbytes=sum(self.checkpoint.part_bytes().values()),
        )
        whole = LocalModel(
            self.checkpoint,
            self.stage_options,
            MachineOptions(not options.no_wired_memory, options.kernels, options.state),
            max_sequences=options.max_sequences,
            prefix_cache=not options.no_prefix_cache,
            vision=options.vision is not VisionMode.off,
            other_bytes=other_bytes,
        )
        seen = options.vision is not VisionMode.off
        self.images = ImageEncoder(self.checkpoint if seen else None, options.dtype)
        self.local = LocalPipelines(whole, options.state, options.prefix_disk)
        self.why_not_alone = why_not_alone(self.local.model)


class ServedParts:
    """The generation loop and the app of an opened model, made on the event loop. The owner calls `close`."""

    def __init__(self, model: OpenedModel, source: PipelineSource, lasting: LastingParts) -> None:
        self.model = model
        config, options, manager = model.checkpoint.config, model.options, lasting.manager
        limits = Limits(config.max_positions, config.vocab_size)
        scheduler = Scheduler(limits, Controller(model.mode, ngram=options.ngram), model.vocabulary)
        if options.backup_memory is not None:
            scheduler.backups.limit = options.backup_memory
        waiting_for = manager.describe_gathering if manager else str
        self.loop = GenerationLoop(source, scheduler, describe_wait=waiting_for)
        model.images.closed = False
        facts = ModelStatus(
            layers="".join(kind[0] for kind in config.shape.kinds),
            has_head=model.checkpoint.mtp.complete,
            context=config.max_positions,
            quantization=model.info.quantization,
            weight_bytes=model.info.nbytes,
            vision_bytes=tower_bytes(model.checkpoint) if model.images.reads_images else 0,
            max_images=options.max_images,
        )
        if manager is not None:
            manager.hand_over = lambda begin: self.loop.hand_over(begin=begin)
            manager.is_handed_over = self.loop.is_handed_over
        status = LiveStatus(self.loop, manager, model.name, model.local.status, facts)
        api = Api(
            self.loop,
            model.tokenizer,
            model.info,
            status,
            lasting.api_options,
            collect_trace=status.trace,
            model_loader=lasting.switch,
            invite=lasting.invite,
            vocabulary=model.vocabulary,
            images=model.images,
            embedder=lasting.embedder,
        )
        self.app = create_app(api, self.loop.frames, lasting.journal)
        self.stored_answers: StoredAnswers = self.app.state.stored_answers

    async def start(self) -> None:
        """Wait for the first plan."""
        await self.loop.start()
        if self.model.options.vision is VisionMode.always:
            await self.model.images.load()

    def count_answers(self) -> int:
        """Return the number of answers that run or wait."""
        scheduler = self.loop.scheduler
        return len(scheduler.running) + len(scheduler.waiting)

    async def close(self, error: ClusterError | None = None) -> None:
        """End all answers with `error`. Without it stored answers continue at the next start."""
        if error is None:
            await self.stored_answers.suspend()
        else:
            await self.stored_answers.fail_all(error)
        await self.loop.close("the server is shutting down" if error is None else error.public)
        self.app.state.api.compiler.close()
        await self.model.images.close()
