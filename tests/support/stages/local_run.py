"""Whole answers from a local engine: what the identity tests and the MTP studies run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.generation.loop import GenerationLoop
from coordinator.generation.request import Finished, GenerationRequest, GenerationStats, TokenChunk
from coordinator.local_engine.generator import local_generator
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.depth.controller import MtpMode
from proto.frame import TokenLogprob


@dataclass(frozen=True)
class Answered:
    """All that came of one request."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: str
    stats: GenerationStats
    seconds: float


async def answer(loop: GenerationLoop, request: GenerationRequest) -> Answered:
    """One request, to its end."""
    started = time.perf_counter()
    chunks = []
    async for event in loop.generate(request):
        loop.scheduler.check()
        if isinstance(event, TokenChunk):
            chunks.append(event)
        elif isinstance(event, Finished):
            end = event
    return Answered(
        tuple(token for chunk in chunks for token in chunk.tokens),
        tuple(entry for chunk in chunks for entry in chunk.logprobs),
        end.reason,
        end.stats,
        time.perf_counter() - started,
    )


async def answer_all(loop: GenerationLoop, requests: Sequence[GenerationRequest]) -> list[Answered]:
    """All requests at once: they share prompts' frames and lanes as the scheduler likes."""
    return list(await asyncio.gather(*(answer(loop, request) for request in requests)))


def run(
    path: Path,
    requests: Sequence[GenerationRequest],
    *,
    mtp: str = "off",
    one_by_one: bool = False,
    **options: Any,
) -> list[Answered]:
    """Answers of a fresh engine over the checkpoint at `path`; `options` are `local_generator`'s."""

    async def main() -> list[Answered]:
        mode = MtpMode.parse(mtp)
        async with local_generator(Checkpoint.open(path), mtp=mode, **options) as loop:
            if one_by_one:
                return [await answer(loop, request) for request in requests]
            return await answer_all(loop, requests)

    return asyncio.run(main())
