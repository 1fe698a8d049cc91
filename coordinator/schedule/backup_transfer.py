"""The transfer of backups between the stages of a pipeline and the coordinator, beside the frames."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from coordinator.pipeline.pipeline import Pipeline
from coordinator.pipeline.prefix_search import FoundPrefix
from coordinator.schedule.backups import MIN_NEW_TOKENS, Backup, BackupInFlight, total_bytes
from coordinator.schedule.prefix_cache import SMALLEST_ENTRY
from coordinator.schedule.scheduler import Scheduler
from coordinator.schedule.sequence import Sequence
from proto.errors import ClusterError
from proto.frame import Evict
from proto.rpc.listener import BackgroundTasks

log = logging.getLogger(__name__)

LONGEST_RESTORE = 5.0
"""Seconds. Longest expected transfer of a prefix to the stages. A longer one may take more time than to compute it."""

SHORTEST_LOAD = 1.0
"""Seconds. Time that a disk has to find a prefix, and at least to load it."""

DISK_PAUSE = 60.0
"""Seconds without loads after a disk was too slow, so that it does not delay every prompt and every open answer."""

SHORTEST_TRANSFER = 1e-3
"""Seconds. Lower bound of a measured transfer, whose clock may not advance."""


class BackupTransfer:
    """The transfers for the sequences of `scheduler`. All errors end the transfer, and nothing else."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._background = BackgroundTasks()
        self._bytes_per_second = 0.0  # speed of the newest transfer
        self._no_disk_until = -math.inf  # no disk is asked before, because one was stuck
        self._no_moves_until = -math.inf  # the same for blocks of other workers
        self._moving = asyncio.Lock()

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
        """Give the stages a prefix that a sequence lacks, from a backup or disks. It waits until `then` is called."""
        if pipeline is None or not sequence.may_restore:
            return
        scheduler = self._scheduler
        entry = scheduler.prefixes.find_entry(sequence.tokens)
        held = 0 if entry is None else len(entry.tokens)
        backup = scheduler.backups.kept.get(sequence.seq_id)
        if backup is not None and not (
            pipeline.makes_backups
            and backup.tokens > held
            and total_bytes([backup]) <= self._bytes_per_second * LONGEST_RESTORE
        ):
            backup = None
        searches = pipeline.has_disk and len(sequence.tokens) - held > SMALLEST_ENTRY
        written = sum(one.restoring or one.restorable_tokens > 0 for one in scheduler.waiting)
        if (backup or searches) and written < pipeline.capacity.sequences:
            sequence.restoring = True
            restore = self._restore_prefix(pipeline, sequence, backup, held, then)
            self._background.spawn(restore)

    async def _restore_prefix(
        self,
        pipeline: Pipeline,
        sequence: Sequence,
        backup: Backup | None,
        held: int,
        then: Callable[[], None],
    ) -> None:
        scheduler, tokens = self._scheduler, 0 if backup is None else backup.tokens
        found = await self._load_prefix(pipeline, sequence, max(tokens, held))
        try:
            if not found and backup is not None:
                restored = sequence.tokens[:tokens]
                await pipeline.write_backup(sequence.seq_id, restored, backup.states)
        except ClusterError as error:
            log.debug("prefix not restored", extra={"error": str(error)})
            tokens = 0
        tokens = found or tokens
        if scheduler.epoch != pipeline.epoch:
            return  # the sequence is part of another plan now
        if sequence in scheduler.waiting:
            sequence.await_backup(tokens, from_disk=found > 0)
        elif tokens or pipeline.has_disk:  # its client has left, and some stages may have loaded
            scheduler.ops.append(Evict(sequence.seq_id))
        then()

    async def _load_prefix(self, pipeline: Pipeline, sequence: Sequence, held: int) -> int:
        """Let stages load a prefix longer than `held` from their disks, unless it takes too long. Return its length."""
        started, tokens = self._clock(), sequence.tokens
        if not pipeline.has_disk or started < self._no_disk_until:
            return 0
        try:
            async with asyncio.timeout(SHORTEST_LOAD):
                found = await pipeline.find_prefix(tokens)
            if await self._move_blocks(pipeline, sequence, held, found):
                found = FoundPrefix(found.most)
            if found.tokens < held + MIN_NEW_TOKENS:
                return 0
            async with asyncio.timeout(self._longest_load(found.tokens - held)):
                await pipeline.load_prefix(sequence.seq_id, tokens[: found.tokens])
        except TimeoutError:
            self._no_disk_until = self._clock() + DISK_PAUSE
            log.warning("prefix not loaded: the disk is too slow", extra={"seconds": DISK_PAUSE})
            return 0
        except ClusterError as error:
            log.info("prefix not loaded", extra={"error": str(error)})
            return 0
        log.info(
            "prefix loaded",
            extra={"tokens": found.tokens, "seconds": round(self._clock() - started, 3)},
        )
        return found.tokens

    async def _move_blocks(
        self, pipeline: Pipeline, sequence: Sequence, held: int, found: FoundPrefix
    ) -> bool:
        """Let workers copy the blocks that they lack, if that seems faster than to compute. Return True on success."""
        gained, started = found.most - max(held, found.tokens), self._clock()
        if not found.moves or gained < SMALLEST_ENTRY or started < self._no_moves_until:
            return False
        limit = self._longest_load(gained)
        nbytes = found.share * pipeline.capacity.entry_bytes(found.most)
        if self._bytes_per_second and nbytes > limit * self._bytes_per_second:
            return False
        prefix = sequence.tokens[: found.most]
        try:
            async with asyncio.timeout(limit), self._moving:
                # Another prompt may have moved it meanwhile.
                now = await pipeline.find_prefix(sequence.tokens)
                if now.tokens < found.most:
                    await pipeline.move_blocks(prefix, found.moves)
        except (TimeoutError, ClusterError) as error:
            self._no_moves_until = self._clock() + DISK_PAUSE
            log.info("prefix not moved", extra={"error": str(error) or f"more than {limit:.1f} s"})
            return False
        seconds = round(self._clock() - started, 3)
        log.info("prefix moved", extra={"tokens": found.most, "seconds": seconds})
        return True

    def _longest_load(self, tokens: int) -> float:
        """Return the seconds in which a load of `tokens` tokens is faster than to compute them."""
        computed = self._scheduler.prompts.expected_seconds(tokens)
        return max(SHORTEST_LOAD, computed or LONGEST_RESTORE)

    async def restore(self, pipeline: Pipeline) -> dict[int, int]:
        """Give the stages backups until the pipeline fails. Return the tokens of each that all have, by sequence."""
        restored: dict[int, int] = {}
        if not self._to_restore(pipeline):
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

    def _to_restore(self, pipeline: Pipeline) -> list[Sequence]:
        """Return the sequences that the next plan may continue from a backup or a prefix on disk, the oldest first."""
        scheduler = self._scheduler
        if not pipeline.has_disk:
            return scheduler.sequences_to_restore()
        open_ones = (*scheduler.running.values(), *scheduler.waiting)
        return sorted((s for s in open_ones if s.may_restore), key=lambda sequence: sequence.seq_id)

    async def _write_all(self, pipeline: Pipeline, restored: dict[int, int]) -> None:
        scheduler, started = self._scheduler, self._clock()
        for sequence in self._to_restore(pipeline)[: pipeline.capacity.sequences]:
            backup = scheduler.backups.kept.get(sequence.seq_id, Backup())
            if tokens := await self._load_prefix(pipeline, sequence, backup.tokens):
                restored[sequence.seq_id] = tokens
                continue
            if not backup.tokens:
                continue  # none on disk, or its client has left meanwhile
            try:
                held = sequence.tokens[: backup.tokens]
                await pipeline.write_backup(sequence.seq_id, held, backup.states)
            except ClusterError as error:
                log.info("backup not restored", extra={"error": str(error)})
                return
            restored[sequence.seq_id] = backup.tokens
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
