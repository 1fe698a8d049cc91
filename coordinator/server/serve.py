"""`mtp-coord serve`, put together: the model, the cluster or this process alone, the loop, the HTTP API.

The other composition root: here workers, scheduler and API meet.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import NoReturn

import mlx.core as mx

from coordinator.api.app import create_app
from coordinator.api.http_server import HttpServer
from coordinator.api.request.context import ApiOptions
from coordinator.cluster.manager import ClusterManager
from coordinator.cluster.options import ManagerOptions
from coordinator.cluster.served import ServedModel
from coordinator.cluster.view import Settings
from coordinator.generation.limits import Limits
from coordinator.generation.loop import GenerationLoop
from coordinator.generation.scheduler import Scheduler
from coordinator.local_engine.generator import effective_mtp_mode
from coordinator.pipeline.local import LocalModel, LocalPipelines, LocalSource
from coordinator.server.live_status import LiveStatus
from coordinator.text.model_info import ModelInfo, generation_defaults
from coordinator.text.tokenizer import Tokenizer
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import resolve_model, snapshot_of
from mtp.depth.controller import Controller, MtpMode
from mtp.head.attention import KVFormat
from proto import cluster_pb2 as pb
from proto.errors import MemoryLimitError, UsageError
from proto.params import Acceptance
from proto.span import Span
from proto.terminal.size import format_size

log = logging.getLogger(__name__)

INTERRUPTED = 130
"""Exit status after Ctrl-C, as proto/terminal/console.py has it."""

USUAL_DEPTH = 1
"""Drafts a step the planner charges the last stage for, where `--mtp auto` will decide."""


@dataclass(frozen=True)
class ServeOptions:
    """What the command line decides. Times in seconds; `nodes` None takes whoever is there when `wait` is over."""

    model: str
    host: str
    port: int
    workers: tuple[str, ...]
    nodes: int | None
    wait: float
    single_node: bool
    mdns: bool
    dtype: str | None
    mtp: MtpMode
    acceptance: Acceptance
    kv_bits: int | None
    failure_timeout: float
    max_sequences: int
    prefill_chunk: int
    step_tokens: int
    prefix_cache: bool
    share_weights: bool
    api_keys: tuple[str, ...] = field(repr=False)  # secrets
    allowed_origins: tuple[str, ...]
    wired: bool
    name: str


async def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C, which end the process once all is closed.

    Raises ClusterError when no first plan can be had, or the port cannot.
    """
    listener = _listen(options.host, options.port)
    checkpoint = Checkpoint.open(resolve_model(options.model))
    mode = effective_mtp_mode(checkpoint, options.mtp)
    tokenizer = Tokenizer.load(checkpoint.path, checkpoint.config.eos_token_ids)
    limits = Limits(
        checkpoint.config.max_positions,
        checkpoint.config.vocab_size,
        prefill_chunk=options.prefill_chunk,
        step_tokens=options.step_tokens,
    )
    local = LocalPipelines(_local_model(checkpoint, options, mode))
    async with AsyncExitStack() as stack:
        manager = None
        if options.single_node:
            if problem := _why_not_alone(local.model):
                raise MemoryLimitError(problem)
            source: ClusterManager | LocalSource = LocalSource(local.make)
        else:
            name = f"{options.name}:{listener.getsockname()[1]}"
            me = pb.Coordinator(id=secrets.token_hex(8), name=name)
            source = manager = _manager(checkpoint, options, mode, me, local)
            local.reserved_bytes = manager.local_worker_bytes
            stack.push_async_callback(manager.close)
            manager.start()
        loop = GenerationLoop(source, Scheduler(limits, Controller(mode)))
        stack.push_async_callback(loop.close)
        model = ModelInfo(
            _served_name(options.model),
            checkpoint.config.max_positions,
            replace(generation_defaults(checkpoint.path), acceptance=options.acceptance),
        )
        status = LiveStatus(loop, manager, model.id, local.status)
        app = create_app(
            loop,
            tokenizer,
            model,
            status,
            ApiOptions(options.api_keys, options.allowed_origins),
            replan=manager.replan if manager else None,
        )
        server = HttpServer(app, loop.close)
        await _run(server, listener, loop, options)
    _leave(INTERRUPTED if server.interrupted else 0)


def _leave(status: int) -> NoReturn:
    """End the process now: freeing what gRPC holds at the interpreter's own end was seen to take for ever."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def _run(
    server: HttpServer, listener: socket.socket, loop: GenerationLoop, options: ServeOptions
) -> None:
    """Answer HTTP from the start, so that /health and /ready tell of a plan that is on its way."""
    # Asked now: who is told to stop closes it first, and the plan may get ready after that.
    host, port = listener.getsockname()[:2]
    http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    starting = asyncio.create_task(loop.start(), name="first plan")
    try:
        await asyncio.wait({http, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()  # raises why there is no plan
            log.info("serving", extra={"url": f"http://{host}:{port}/v1", "model": options.model})
        await http
    finally:
        starting.cancel()
        server.should_exit = True
        await asyncio.gather(http, return_exceptions=True)


def _manager(
    checkpoint: Checkpoint,
    options: ServeOptions,
    mode: MtpMode,
    me: pb.Coordinator,
    local: LocalPipelines,
) -> ClusterManager:
    repo, revision = snapshot_of(checkpoint.path) or ("", "")
    served = ServedModel(
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
        draft_depth=USUAL_DEPTH if mode.depth is None else mode.depth,
        max_sequences=options.max_sequences,
        prefix_cache=options.prefix_cache,
        share_weights=options.share_weights,
    )
    settings = Settings(
        nodes=options.nodes or len(options.workers) or None,
        wait=options.wait,
        why_not_alone=_why_not_alone(local.model),
    )
    manager_options = ManagerOptions(
        me, settings, options.workers, options.mdns, options.failure_timeout
    )
    return ClusterManager(served, manager_options, local.make)


def _local_model(checkpoint: Checkpoint, options: ServeOptions, mode: MtpMode) -> LocalModel:
    """All layers in this process."""
    return LocalModel(
        checkpoint,
        [Span(0, checkpoint.config.num_layers)],
        getattr(mx, options.dtype) if options.dtype else None,
        KVFormat.of(checkpoint.config.head_dim, options.kv_bits),
        with_head=mode.depth != 0,
        max_sequences=options.max_sequences,
        prefix_cache=options.prefix_cache,
        wired=options.wired,
    )


def _why_not_alone(model: LocalModel) -> str:
    """Why this machine cannot serve the model without workers; nothing where it can. Reads headers only."""
    try:
        model.capacity()
    except MemoryLimitError as error:
        weights = format_size(sum(model.checkpoint.part_bytes().values()))
        return (
            f"no worker serves, and the model ({weights}) does not fit into this machine: start mtp-worker on "
            f"other machines ({error})"
        )
    return ""


def _listen(host: str, port: int) -> socket.socket:
    """Bind before anything is loaded: a port in use is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"--port {port}: {host}:{port} cannot be had ({error.strerror}); choose another, or 0 for any"
        ) from error
    return listener


def _served_name(model: str) -> str:
    """What clients call the model: never a path of this machine."""
    return model if _is_repo(model) else model.rstrip("/").rpartition("/")[2]


def _is_repo(model: str) -> bool:
    return model.count("/") == 1 and not model.startswith(("/", ".", "~"))
