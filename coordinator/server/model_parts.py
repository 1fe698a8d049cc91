"""The parts of a server that depend on its model: the cluster manager, the local model and the served name."""

from __future__ import annotations

import math

import mlx.core as mx

from coordinator.cluster.manager import ClusterManager
from coordinator.cluster.options import ManagerOptions
from coordinator.cluster.served import ServedModel
from coordinator.cluster.view import Settings
from coordinator.pipeline.local import LocalModel, LocalPipelines
from coordinator.server.options import DEFAULT_WAIT, ServeOptions
from coordinator.workers.connection import ConnectionPolicy
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import snapshot_of
from mtp.depth.controller import MtpMode
from mtp.head.attention import KVFormat
from proto import cluster_pb2 as pb
from proto.errors import MemoryLimitError
from proto.span import Span
from proto.terminal.size import format_size
from proto.trust.node_trust import NodeTrust

AUTO_DEPTH = 1
"""Drafts per step for which the planner charges the last stage while `--mtp auto` chooses the depth."""


def make_manager(
    checkpoint: Checkpoint,
    options: ServeOptions,
    mode: MtpMode,
    me: pb.Coordinator,
    local: LocalPipelines,
    trust: NodeTrust | None = None,
) -> ClusterManager:
    """Return the manager of the workers, which uses `local` when no worker serves."""
    manager_options = ManagerOptions(
        me,
        cluster_settings(options, why_not_alone(local.model)),
        options.workers,
        options.mdns,
        options.failure_timeout,
        ConnectionPolicy(trust, options.insecure),
    )
    return ClusterManager(served_model(checkpoint, options, mode), manager_options, local.make)


def served_model(checkpoint: Checkpoint, options: ServeOptions, mode: MtpMode) -> ServedModel:
    """Return the checkpoint with the options of every Load request."""
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
        options.dtype,
        options.kv_bits or 0,
        with_head=options.mtp.depth != 0,
        draft_depth=AUTO_DEPTH if mode.depth is None else mode.depth,
        max_sequences=options.max_sequences,
        prefix_cache=options.prefix_cache,
        share_weights=options.share_weights,
        exact=options.exact,
        draft_vocab=options.draft_vocab,
    )


def cluster_settings(options: ServeOptions, why_not_alone: str) -> Settings:
    """Return the waits and the number of workers that the command line asks for.

    Without --nodes the workers named by --worker are expected, but not required.
    """
    return Settings(
        nodes=options.nodes or len(options.workers) or None,
        nodes_required=options.nodes is not None and not options.alone_ok,
        wait=DEFAULT_WAIT if options.wait is None else options.wait,
        first_wait=math.inf if options.wait is None else options.wait,
        why_not_alone=why_not_alone,
        auto_replan=options.auto_replan,
    )


def local_model(checkpoint: Checkpoint, options: ServeOptions, mode: MtpMode) -> LocalModel:
    """Return all layers as one stage of this process."""
    return LocalModel(
        checkpoint,
        [Span(0, checkpoint.config.num_layers)],
        getattr(mx, options.dtype) if options.dtype else None,
        KVFormat.of(checkpoint.config.head_dim, options.kv_bits),
        with_head=mode.depth != 0,
        max_sequences=options.max_sequences,
        prefix_cache=options.prefix_cache,
        wired=options.wired,
        exact=options.exact,
        draft_vocab=options.draft_vocab,
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
