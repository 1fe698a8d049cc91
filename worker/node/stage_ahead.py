"""The stage of the next plan or model, loaded beside the stage in force so that the present one serves meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from functools import partial

import mlx.core as mx

from mtp.checkpoint.format.checkpoint import Checkpoint
from proto import cluster_pb2 as pb
from proto.errors import DeadlineError, StaleEpochError
from proto.progress import OnProgress
from worker.engine.engine_thread import EngineThread
from worker.node.identity import Identity
from worker.node.loading import LoadedStage, part_seconds, stage_steps
from worker.node.stage_key import StageKey

log = logging.getLogger(__name__)

PIECE_BYTES = 2**23
"""Bytes of one read that brings a file into the page cache."""

Steps = Generator[str, None, LoadedStage]


class StageAhead:
    """At most one stage that no plan uses yet. The engine thread loads it in short steps between frames."""

    def __init__(self, identity: Identity, thread: EngineThread) -> None:
        self._identity = identity
        self._thread = thread
        self._loaded: LoadedStage | None = None
        self._loading: object | None = None
        """A marker of the current load. An older load that finds another marker ends."""

    async def load(self, model: pb.ModelRef, key: StageKey, on_progress: OnProgress) -> LoadedStage:
        """Load the stage `key`, unless it is loaded already, and return it. `on_progress` runs on the event loop.

        Raises MemoryLimitError if it does not fit beside the memory in use, and StaleEpochError when `take` or `drop`
        ends the load. Also raises DeadlineError for a disk that hangs, and the errors of `read_stage`.
        """
        if self._loaded is not None and self._loaded.key == key:
            return self._loaded
        self.drop()
        loading = self._loading = object()
        checkpoint = await asyncio.to_thread(self._identity.models.find, model)
        steps = stage_steps(
            self._identity,
            checkpoint,
            key,
            expect=self._thread.expect,
            on_progress=partial(self._thread.post, on_progress),
            beside=True,
        )
        seconds = part_seconds(max(checkpoint.part_bytes().values()))
        try:
            cached = ""
            while True:
                part = await self._thread.call(partial(self._step, steps, seconds))
                if self._loading is not loading:
                    raise StaleEpochError("the plan changed while the next stage was loading")
                if isinstance(part, LoadedStage):
                    break
                if part not in ("", cached):
                    cached = part
                    await _cache_part(checkpoint, part, seconds)
        except BaseException:
            self._thread.submit(partial(_abandon, steps))
            raise
        self._loaded = part
        log.info("next stage loaded", extra={"layers": str(key.span), "bytes": part.weight_bytes})
        return part

    def _step(self, steps: Steps, seconds: float) -> str | LoadedStage:
        """Run the next step, of at most `seconds`. Return the part that the step after it reads, or the stage."""
        self._thread.expect(seconds)
        try:
            return next(steps)
        except StopIteration as end:
            loaded: LoadedStage = end.value
            return loaded

    def take(self, key: StageKey) -> LoadedStage | None:
        """Return the loaded stage if it is `key`, and hold none from now on. Another stage is dropped."""
        loaded = self._loaded
        if loaded is not None and loaded.key == key:
            self._loaded = self._loading = None
            return loaded
        self.drop()
        return None

    def drop(self) -> None:
        """Free the stage, and end a load in progress."""
        self._loading = None
        if self._loaded is not None:
            self._loaded = None
            self._thread.submit(mx.clear_cache)


def _abandon(steps: Steps) -> None:
    """Free the weights of an unfinished load. Runs on the engine thread."""
    steps.close()
    mx.clear_cache()


async def _cache_part(checkpoint: Checkpoint, part: str, seconds: float) -> None:
    """Read a part on another thread. Raises DeadlineError if the disk takes longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.to_thread(_read_into_page_cache, checkpoint, part)
    except TimeoutError:
        raise DeadlineError(
            f"reading {part} of {checkpoint.path.name} took longer than {seconds:.0f} s"
        ) from None


def _read_into_page_cache(checkpoint: Checkpoint, part: str) -> None:
    """Read the bytes of a part, so that the engine thread does not wait for the disk and delay frames."""
    names = {name for source in checkpoint.plans[part].values() for name in source.tensors}
    buffer = bytearray(PIECE_BYTES)
    for info in sorted((checkpoint.tensors[name] for name in names), key=lambda one: one.start):
        with info.file.open("rb", buffering=0) as stream:
            stream.seek(info.start)
            left = info.nbytes
            while left > 0 and (
                count := stream.readinto(memoryview(buffer)[: min(left, PIECE_BYTES)])
            ):
                left -= count
