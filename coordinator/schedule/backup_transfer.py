"""The transfer of backups between the stages of a pipeline and the coordinator, beside the frames."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from statistics import median_low

from coordinator.pipeline.pipeline import FoundPrefix, Pipeline
from coordinator.schedule.backups import MIN_NEW_TOKENS, Backup, BackupInFlight
from coordinator.schedule.prefix_cache import SMALLEST_ENTRY
from coordinator.schedule.scheduler import Scheduler
from coordinator.schedule.sequence import Sequence
from proto.backup import BackupTooLargeError
from proto.errors import ClusterError
from proto.frame import Evict
from proto.rpc.listener import BackgroundTasks

log = logging.getLogger(__name__)

SHORTEST_RESTORE = 0.2
"""Seconds. A backup may always take so long, since the stages compute other sequences meanwhile."""

USUAL_LOAD = 5.0
"""Seconds that a disk has to load a prefix while the time to compute it is unknown."""

SHORTEST_LOAD = 1.0
"""Seconds. Time that a disk has to find a prefix, and at least to load it."""

DISK_PAUSE = 60.0
"""Seconds without loads after a disk was too slow, so that it does not delay every prompt and every open answer."""


class BackupTransfer:
    """The transfers for the sequences of `scheduler`. All errors end the transfer, and nothing else."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._background = BackgroundTasks()
        # Bytes per second. Transfers of few bytes seem slow, so the median of the newest ones counts.
        self._speeds: deque[float] = deque(maxlen=5)
        self._move_speeds: deque[float] = deque(maxlen=5)
        self._no_disk_until = -math.inf  # no disk is asked before, because one was stuck
        self._giving = asyncio.Lock()  # one after the other, so that the first ones start soon

    def read_soon(self, pipeline: Pipeline, made: BackupInFlight, then: Callable[[], None]) -> None:
        """Start to read a backup that the stages have made. `then` is called afterwards."""
        self._background.spawn(self._read(pipeline, made, then))

    async def _read(self, pipeline: Pipeline, made: BackupInFlight, then: Callable[[], None]) -> None:
        backups, started = self._scheduler.backups, self._clock()
        try:
            found = await pipeline.read_backup(made.seq_id, backups.limit)
            backups.complete_backup(made, found.tokens, found.states)
            seconds = found.seconds or 1e-3
            self._speeds.append(sum(len(state.data) for state in found.states) / seconds)
            log.debug("backup read", extra={"seq_id": made.seq_id, "tokens": found.tokens, "bytes": backups.nbytes})
        except Exception as error:  # after a bug here too, the next backup must follow
            level = logging.DEBUG if isinstance(error, ClusterError) else logging.ERROR
            log.log(level, "backup not read", extra={"seq_id": made.seq_id, "error": repr(error)})
            seconds = self._clock() - started
            if isinstance(error, BackupTooLargeError):
                backups.skip_sequence(made.seq_id)
        backups.end_backup(made, seconds, self._clock())
        then()

    def restore_states(self, pipeline: Pipeline, then: Callable[[], None]) -> None:
        """Start to give the stages states that waiting sequences lack, in their order, while these have room.

        A state takes the place and the memory of a running sequence. `then` is called after each.
        """
        scheduler, room = self._scheduler, pipeline.capacity
        if all(one.sought for one in scheduler.waiting):
            return
        placed = [*scheduler.running.values(), *(s for s in scheduler.waiting if s.is_placed)]
        for sequence in scheduler.prompts.sort_waiting(scheduler.running, scheduler.waiting):
            if sequence.sought or not sequence.may_restore:
                continue
            reserved = sum(one.capacity for one in (*placed, sequence))
            if len(placed) >= room.sequences or reserved > room.kv_tokens:
                return
            sequence.sought = True
            entry = scheduler.prefixes.find_entry(sequence.tokens, sequence.hash_blocks())
            held = 0 if entry is None else entry.tokens
            searches = pipeline.has_disk and len(sequence.tokens) - held > SMALLEST_ENTRY
            if searches or self._useful_backup(sequence, held) is not None:
                sequence.restoring = True
                placed.append(sequence)
                self._background.spawn(self._transfer_state(pipeline, sequence, held, then))

    def _useful_backup(self, sequence: Sequence, held: int) -> Backup | None:
        """Return the backup of a sequence if it seems faster than to compute what follows `held` tokens."""
        backup = self._scheduler.backups.kept.get(sequence.seq_id)
        if backup is None or backup.tokens <= held:
            return None
        computed = self._scheduler.prompts.expected_seconds(backup.tokens - held)
        seconds = math.inf if computed is None else max(SHORTEST_RESTORE, computed)
        speed = median_low(self._speeds or [math.inf])
        return backup if backup.nbytes <= seconds * speed else None

    async def _transfer_state(
        self, pipeline: Pipeline, sequence: Sequence, held: int, then: Callable[[], None]
    ) -> None:
        scheduler, found, tokens = self._scheduler, 0, 0
        attempt = sequence.open_restores + 1  # disk and backup together are one
        try:
            backup = self._useful_backup(sequence, held)
            known = held if backup is None else backup.tokens
            found = tokens = await self._load_prefix(pipeline, sequence, known, attempt)
            if not found:
                tokens = await self._write_backup(pipeline, sequence, held, attempt)
        except Exception:  # a bug here: the sequence must not wait without end
            log.exception("a state could not be restored")
        waits = sequence in scheduler.waiting
        if waits:
            sequence.await_backup(tokens, from_disk=found > 0)
        if sequence.open_restores == attempt and not (tokens and waits):
            scheduler.ops.append(Evict(sequence.seq_id))  # some stages may have it
        then()

    async def _write_backup(self, pipeline: Pipeline, sequence: Sequence, held: int, attempt: int) -> int:
        """Give the stages the backup of a sequence. Return its tokens, or 0 without one or if it fails."""
        async with self._giving:
            backup = self._useful_backup(sequence, held)
            if backup is None or sequence not in self._scheduler.waiting:
                return 0
            sequence.open_restores = attempt
            tokens = sequence.tokens[: backup.tokens]
            try:
                await pipeline.write_backup(sequence.seq_id, tokens, backup.states)
            except ClusterError as error:
                log.info("backup not restored", extra={"error": str(error)})
                return 0
        log.info("backup restored", extra={"epoch": pipeline.epoch, "tokens": len(tokens)})
        return len(tokens)

    async def _load_prefix(self, pipeline: Pipeline, sequence: Sequence, held: int, attempt: int) -> int:
        """Let stages load a prefix longer than `held` from their disks, unless it takes too long. Return its length."""
        started, tokens, moved = self._clock(), sequence.tokens, 0.0
        if not pipeline.has_disk or started < self._no_disk_until:
            return 0
        try:
            async with asyncio.timeout(SHORTEST_LOAD):
                found = await pipeline.find_prefix(tokens)
            moved = self._moved_bytes(pipeline, found, held)
            found = int(found if moved or not isinstance(found, FoundPrefix) else found.own)
            if found < held + MIN_NEW_TOKENS:
                return 0
            async with self._giving:
                if sequence not in self._scheduler.waiting:
                    return 0
                sequence.open_restores, began = attempt, self._clock()
                async with asyncio.timeout(self._longest_load(found - held, moves=moved > 0)):
                    await pipeline.load_prefix(sequence.seq_id, tokens[:found])
                if moved:
                    self._move_speeds.append(moved / max(1e-3, self._clock() - began))
        except TimeoutError:
            if moved:
                self._move_speeds.append(moved / self._longest_load(found - held, moves=True))
                log.info("prefix not loaded: other workers gave it too slowly", extra={"tokens": found})
                return 0
            self._no_disk_until = self._clock() + DISK_PAUSE
            log.warning("prefix not loaded: the disk is too slow", extra={"seconds": DISK_PAUSE})
            return 0
        except ClusterError as error:
            log.info("prefix not loaded", extra={"error": str(error)})
            return 0
        log.info("prefix loaded", extra={"tokens": found, "seconds": round(self._clock() - started, 3)})
        return found

    def _moved_bytes(self, pipeline: Pipeline, found: int, held: int) -> float:
        """Return the bytes that stages would get from other workers' disks: 0 if to compute them seems faster."""
        if not isinstance(found, FoundPrefix) or not found.share:
            return 0.0
        moved = found.share * pipeline.capacity.entry_bytes(found)
        seconds = moved / median_low(self._move_speeds or [math.inf])
        return moved if seconds <= self._longest_load(found - max(held, found.own), moves=True) else 0.0

    def _longest_load(self, tokens: int, *, moves: bool = False) -> float:
        """Return the seconds in which a load of `tokens` tokens is faster than to compute them.

        A disk has SHORTEST_LOAD in any case, unless layers of the state move between workers.
        """
        computed = self._scheduler.prompts.expected_seconds(tokens)
        return computed or USUAL_LOAD if moves else max(SHORTEST_LOAD, computed or USUAL_LOAD)

    async def close(self) -> None:
        """Cancel the transfers, which end with their plan. The next plan may have other disks."""
        self._no_disk_until = -math.inf
        await self._background.close()
