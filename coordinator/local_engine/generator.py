"""A local engine from options: the model's stages in this process, and the loop that serves requests over them.

What `mtp-coord generate`, the single-node server and the tests share. Requests go in as tokens; text is their business.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import mlx.core as mx

from coordinator.generation.limits import Limits
from coordinator.generation.loop import GenerationLoop
from coordinator.generation.scheduler import Scheduler
from coordinator.local_engine.repair_hint import head_remedy, what_head_lacks
from coordinator.pipeline.local import LocalModel, LocalPipelines, LocalSource
from coordinator.planning.model_costs import model_costs
from coordinator.planning.plan import NodeSpec, make_plan
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.depth.controller import Controller, MtpMode
from mtp.head.attention import KVFormat
from proto.errors import SpanError, UsageError
from proto.progress import OnProgress
from proto.span import Span

log = logging.getLogger(__name__)

AUTO = MtpMode()

ENDLESS_BYTES = 2**60
"""Memory of a stage in this process, to the planner: all stages share one machine, so none is short of it."""


@asynccontextmanager
async def local_generator(
    checkpoint: Checkpoint,
    *,
    stages: int = 1,
    dtype: mx.Dtype | None = None,
    mtp: MtpMode = AUTO,
    kv_bits: int | None = None,
    prefix_cache: bool = True,
    limits: Limits | None = None,
    on_progress: OnProgress | None = None,
) -> AsyncIterator[GenerationLoop]:
    """Load `checkpoint`, cut evenly into `stages`, and serve requests until the block is left.

    `dtype` None keeps what is stored; `kv_bits` 4 or 8 quantizes the K/V; without
    `prefix_cache` no prompt skips what an earlier one began with. `on_progress` hears bytes read and bytes in
    all, from the thread that loads. Raises SpanError for more stages than layers, UsageError for a depth
    that needs a head this checkpoint lacks, and what loading raises.
    """
    mode = mtp_in_force(checkpoint, mtp)
    model = LocalModel(
        checkpoint,
        even_spans(checkpoint, stages),
        dtype,
        KVFormat.of(checkpoint.config.head_dim, kv_bits),
        with_head=mode.depth != 0,
        prefix_cache=prefix_cache,
    )
    limits = limits or Limits(checkpoint.config.max_positions, checkpoint.config.vocab_size)
    make = partial(LocalPipelines(model).make, on_progress=on_progress)
    loop = GenerationLoop(LocalSource(make), Scheduler(limits, Controller(mode)))
    try:
        await loop.start()
        yield loop
    finally:
        await loop.close()


def even_spans(checkpoint: Checkpoint, stages: int) -> tuple[Span, ...]:
    """The cut the planner makes for equal machines. Raises SpanError for more stages than layers."""
    layers = checkpoint.config.num_layers
    if stages > layers:
        raise SpanError(
            f"--stages {stages}: the model has {layers} layers, and a stage takes one or more"
        )
    nodes = [NodeSpec(f"stage {number}", ENDLESS_BYTES) for number in range(stages)]
    return tuple(stage.span for stage in make_plan(model_costs(checkpoint), nodes).stages)


def mtp_in_force(checkpoint: Checkpoint, asked: MtpMode) -> MtpMode:
    """What of `--mtp` this checkpoint can do: `auto` goes on without a head, and the log says so.

    Raises UsageError when drafts were asked for.
    """
    if asked.depth == 0 or checkpoint.mtp.complete:
        return asked
    missing = what_head_lacks(checkpoint)
    if asked == AUTO:
        log.warning(
            "decoding without drafts: this checkpoint has no whole MTP head",
            extra={"missing": missing},
        )
        return MtpMode(0)
    raise UsageError(
        f"--mtp {asked}: this checkpoint has no whole MTP head, it lacks {missing}. "
        f"{head_remedy(checkpoint, replace=checkpoint.mtp.present)}. Or use --mtp off"
    )
