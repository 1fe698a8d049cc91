"""Whole answers from a local engine: what the identity tests and the MTP studies run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.drafts.controller import MtpMode
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.request import (
    Finished,
    GenerationRequest,
    GenerationStats,
    TokenChunk,
    generate,
)
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.frame import TokenLogprob
from tests.support.stages.eager_matches import EagerMatches
from tests.support.stages.local_stages import local_stages


@dataclass(frozen=True)
class Answered:
    """The complete answer to one request."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: str
    stats: GenerationStats
    seconds: float
    accepted: tuple[int, ...] = ()
    """The tokens that were drafts."""


async def answer(loop: GenerationLoop, request: GenerationRequest) -> Answered:
    """Run one request to its end."""
    started = time.perf_counter()
    chunks = []
    async for event in generate(loop, request):
        loop.scheduler.check()
        if isinstance(event, TokenChunk):
            chunks.append(event)
        elif isinstance(event, Finished):
            assert event.error is None, event.error
            end = event
    return Answered(
        tuple(token for chunk in chunks for token in chunk.tokens),
        tuple(entry for chunk in chunks for entry in chunk.logprobs),
        end.reason,
        end.stats,
        time.perf_counter() - started,
        tuple(token for chunk in chunks for token in chunk.tokens[: chunk.accepted]),
    )


async def answer_all(loop: GenerationLoop, requests: Sequence[GenerationRequest]) -> list[Answered]:
    """Run all requests at once. They share frames and micro-batches."""
    return list(await asyncio.gather(*(answer(loop, request) for request in requests)))


def run(
    path: Path,
    requests: Sequence[GenerationRequest],
    *,
    mtp: str = "off",
    one_by_one: bool = False,
    ngrams: bool = False,
    **options: Any,
) -> list[Answered]:
    """Return the answers of a fresh engine over the checkpoint at `path`. `options` go to `local_stages`.

    With `ngrams` every match of a text makes drafts.
    """

    async def main() -> list[Answered]:
        """Run the requests on a local engine."""
        mode = MtpMode.parse(mtp)
        async with local_stages(Checkpoint.open(path), mtp=mode, **options) as loop:
            if ngrams:
                loop.scheduler.controller = EagerMatches(mode)
            if one_by_one:
                return [await answer(loop, request) for request in requests]
            return await answer_all(loop, requests)

    return asyncio.run(main())
