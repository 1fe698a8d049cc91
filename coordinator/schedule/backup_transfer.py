"""The transfer of backups between the stages of a pipeline and the coordinator, beside the frames."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from coordinator.pipeline.pipeline import Pipeline
from coordinator.schedule.backups import Backup, BackupInFlight, total_bytes
from coordinator.schedule.scheduler import Scheduler
from coordinator.schedule.sequence import Sequence
from proto.errors import ClusterError
from proto.frame import Evict
from proto.rpc.listener import BackgroundTasks

log = logging.getLogger(__name__)

LONGEST_RESTORE = 5.0
"""Seconds. Longest expected transfer of a prefix to the stages. A longer one may take more time than to compute it."""

SHORTEST_TRANSFER = 1e-3
"""Seconds. Lower bound of a measured transfer, whose clock may not advance."""


class BackupTransfer:
    """The transfers for the sequences of `scheduler`. All errors end the transfer, and nothing else."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._background = BackgroundTasks()
        self._bytes_per_second = 0.0
        """Speed of the newest transfer."""

    def read_soon(self, pipeline: Pipeline, made: BackupInFlight) -> None:
        """Start to read a backup that the stages have made."""
        self._background.spawn(self._read(pipeline, made))

    async def _read(self, pipeline: Pipeline, made: BackupInFlight) -> None:
        backups, started = self._scheduler.backups, self._clock()
        try:
            found = await pipeline.read_backup(made.seq_id, backups.limit)
        except ClusterError as error:
            log.debug("backup not read", extra={"seq_id": made.seq_id, "error": str(error)})
            seconds = self._clock() - started
        else:
            backups.complete_backup(made, found.tokens, found.states)
            seconds = max(found.seconds, SHORTEST_TRANSFER)
            self._bytes_per_second = sum(len(state.data) for state in found.states) / seconds
            log.debug(
                "backup read",
                extra={"seq_id": made.seq_id, "tokens": found.tokens, "bytes": backups.nbytes},
            )
        backups.end_backup(made, seconds, self._clock())

    def restore_prefix(
        self, pipeline: Pipeline | None, sequence: Sequence, then: Callable[[], None]
    ) -> None:
        """Give the stages the backup of a prefix of a new sequence, if they lack it, and call `then` afterwards.

        The sequence waits meanwhile. Without a pipeline the next one restores the backup.
        """
        scheduler = self._scheduler
        backup = scheduler.backups.kept.get(sequence.seq_id)
        if pipeline is None or backup is None or not pipeline.makes_backups:
            return
        entry = scheduler.prefixes.find_entry(sequence.tokens)
        written = sum(one.restoring or one.restorable_tokens > 0 for one in scheduler.waiting)
        held = 0 if entry is None else len(entry.tokens)
        pays = total_bytes([backup]) <= self._bytes_per_second * LONGEST_RESTORE
        if pays and backup.tokens > held and written < pipeline.capacity.sequences:
            sequence.restoring = True
            self._background.spawn(self._write_prefix(pipeline, sequence, backup, then))

    async def _write_prefix(
        self, pipeline: Pipeline, sequence: Sequence, backup: Backup, then: Callable[[], None]
    ) -> None:
        scheduler, tokens = self._scheduler, backup.tokens
        try:
            await pipeline.write_backup(sequence.seq_id, sequence.tokens[:tokens], backup.states)
        except ClusterError as error:
            log.debug("prefix not restored", extra={"error": str(error)})
            tokens = 0
        if scheduler.epoch != pipeline.epoch:
            return  # the sequence is part of another plan now
        if sequence in scheduler.waiting:
            sequence.await_backup(tokens)
        elif tokens:  # its client has left
            scheduler.ops.append(Evict(sequence.seq_id))
        then()

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
                held = sequence.tokens[:tokens]
                await pipeline.write_backup(sequence.seq_id, held, backup.states)
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
