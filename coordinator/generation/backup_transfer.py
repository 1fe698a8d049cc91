"""The transfer of backups between the stages of a pipeline and the coordinator, beside the frames."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from coordinator.generation.backups import BackupInFlight
from coordinator.generation.scheduler import Scheduler
from coordinator.pipeline.base import Pipeline
from proto.errors import ClusterError
from proto.rpc.background_tasks import BackgroundTasks

log = logging.getLogger(__name__)


class BackupTransfer:
    """The transfers for the sequences of `scheduler`. All errors end the transfer, and nothing else."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._background = BackgroundTasks()

    def read_soon(self, pipeline: Pipeline, made: BackupInFlight) -> None:
        """Start to read a backup that the stages have made."""
        self._background.spawn(self._read(pipeline, made))

    async def _read(self, pipeline: Pipeline, made: BackupInFlight) -> None:
        backups, started = self._scheduler.backups, self._clock()
        try:
            tokens, states = await pipeline.read_backup(made.seq_id, backups.limit)
        except ClusterError as error:
            log.debug("backup not read", extra={"seq_id": made.seq_id, "error": str(error)})
        else:
            backups.complete_backup(made, tokens, states)
            log.debug(
                "backup read",
                extra={"seq_id": made.seq_id, "tokens": tokens, "bytes": backups.nbytes},
            )
        now = self._clock()
        backups.end_backup(made, now - started, now)

    async def restore(self, pipeline: Pipeline) -> dict[int, int]:
        """Give the stages the backups of the running sequences, the oldest first, until the pipeline fails.

        Return the tokens of each backup that all stages have, by sequence.
        """
        restored: dict[int, int] = {}
        if not self._scheduler.sequences_to_restore():
            return restored
        writing = asyncio.create_task(self._write_all(pipeline, restored))
        failing = asyncio.create_task(pipeline.receive_frame())  # no frame is in flight yet
        try:
            await asyncio.wait({writing, failing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            writing.cancel()
            failing.cancel()
            await asyncio.gather(writing, failing, return_exceptions=True)
        return restored

    async def _write_all(self, pipeline: Pipeline, restored: dict[int, int]) -> None:
        scheduler, started = self._scheduler, self._clock()
        for sequence in scheduler.sequences_to_restore()[: pipeline.capacity.sequences]:
            backup = scheduler.backups.kept.get(sequence.seq_id)
            if backup is None:
                continue  # its client has left meanwhile
            tokens = backup.tokens
            try:
                await pipeline.write_backup(
                    sequence.seq_id, sequence.tokens[:tokens], backup.states
                )
            except ClusterError as error:
                log.info("backup not restored", extra={"error": str(error)})
                return
            restored[sequence.seq_id] = tokens
        log.info(
            "backups restored",
            extra={
                "epoch": pipeline.epoch,
                "sequences": len(restored),
                "tokens": sum(restored.values()),
                "seconds": round(self._clock() - started, 3),
            },
        )

    async def close(self) -> None:
        """Cancel the transfers."""
        await self._background.close()
