"""A generator in this process: a model, and the loop that serves requests with it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.drafts.prompt_lookup import NgramMode
from coordinator.pipeline.local_pipeline import LocalModel, LocalPipelines
from coordinator.schedule.admission import Limits
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.scheduler import Scheduler
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.missing_head import missing_head_tensors, repair_hint
from proto.errors import UsageError
from proto.stage_options import StageOptions
from proto.terminal.progress import OnProgress

log = logging.getLogger(__name__)


AUTO = MtpMode()
"""The default mode: draft where it pays, and decode without drafts if there is no head."""


@asynccontextmanager
async def local_generator(
    checkpoint: Checkpoint,
    *,
    options: StageOptions | None = None,
    mtp: MtpMode = AUTO,
    ngram: NgramMode = NgramMode.off,
    prefix_cache: bool = True,
    on_progress: OnProgress | None = None,
) -> AsyncIterator[GenerationLoop]:
    """Load `checkpoint`, and serve requests until the block is left.

    It has its head if `mtp` uses it. Without `prefix_cache` every prompt is computed from its first token. The loading
    thread calls `on_progress(done, total)` with bytes. Raises UsageError for drafts without a head, and the errors of
    loading.
    """
    options = options or StageOptions()
    mode = effective_mtp_mode(checkpoint, mtp, trims=bool(options.draft_vocab))
    options = replace(options, with_head=mode.depth != 0)
    model = LocalModel(checkpoint, options, prefix_cache=prefix_cache)
    source = LocalPipelines(model, on_progress=on_progress)
    limits = Limits(checkpoint.config.max_positions, checkpoint.config.vocab_size)
    loop = GenerationLoop(source, Scheduler(limits, Controller(mode, ngram=ngram)))
    try:
        await loop.start()
        yield loop
    finally:
        await loop.close()


def effective_mtp_mode(checkpoint: Checkpoint, requested: MtpMode, *, trims: bool = False) -> MtpMode:
    """Return the supported part of `--mtp`.

    Without a head `auto` logs a warning, and drafts raise UsageError, also if `--draft-vocab` `trims` their vocabulary.
    """
    if requested.depth == 0 or checkpoint.mtp.complete:
        return requested
    if trims:
        raise UsageError("--draft-vocab is for the drafts of an MTP head, which this checkpoint lacks. Leave it out")
    missing = missing_head_tensors(checkpoint)
    if requested == AUTO and checkpoint.config.shape.head is None:
        return MtpMode(0)
    if requested == AUTO:
        log.warning(
            "decoding without drafts: this checkpoint has no complete MTP head. mtp-coord serve --fetch-head adds it",
            extra={"missing": missing},
        )
        return MtpMode(0)
    raise UsageError(
        f"--mtp {requested}: this checkpoint has no complete MTP head. Missing: {missing}. "
        f"{repair_hint(checkpoint, replace=checkpoint.mtp.present)}. Or use --mtp off"
    )
