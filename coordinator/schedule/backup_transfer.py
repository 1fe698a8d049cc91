"""The transfer of backups between the stages of a pipeline and the coordinator, beside the frames."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from statistics import median_low

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
"""Seconds. Longest expected transfer of a state to the stages while the time to compute it is unknown."""

SHORTEST_LOAD = 1.0
"""Seconds. Time that a disk has to find a prefix, and at least to load it."""

DISK_PAUSE = 60.0
"""Seconds without loads after a disk was too slow, so that it does not delay every prompt and every open answer."""

RECENT_TRANSFERS = 5
"""Transfers. The speed of the network is their median, since those of few bytes seem slow."""

SHORTEST_TRANSFER = 1e-3
"""Seconds. Lower bound of a measured transfer, whose clock may not advance."""


class BackupTransfer:
    """The transfers for the sequences of `scheduler`. All errors end the transfer, and nothing else."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._background = BackgroundTasks()
        self._speeds: deque[float] = deque(maxlen=RECENT_TRANSFERS)  # bytes per second
        self._no_disk_until = -math.inf  # no disk is asked before, because one was stuck
        self._no_moves_until = -math.inf  # the same for blocks of other workers
        self._moving = asyncio.Lock()
        self.start_plan()

    def start_plan(self) -> None:
        """Let no write of the former plan delay those of the next one."""
        self._writing = (
            asyncio.Lock()
        )  # one after the other, so that the first sequences start soon

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
            self._speeds.append(sum(len(state.data) for state in found.states) / seconds)
            log.debug(
                "backup read",
                extra={"seq_id": made.seq_id, "tokens": found.tokens, "bytes": backups.nbytes},
            )
        backups.end_backup(made, seconds, self._clock())

    def restore_states(self, pipeline: Pipeline, then: Callable[[], None]) -> None:
        """Start to give the stages states that waiting sequences lack, in their order, while these have room.

        A state takes memory beside the running sequences, and so counts as one of them. `then` is called after each.
        """
        scheduler, room = self._scheduler, pipeline.capacity
        if all(one.sought for one in scheduler.waiting):
            return
        held = [one for one in scheduler.waiting if one.restoring or one.restorable_tokens]
        reserved = sum(one.capacity for one in (*scheduler.running.values(), *held))
        for sequence in scheduler.prompts.sort_waiting(scheduler.running, scheduler.waiting):
            if sequence.sought:
                continue
            if len(held) >= room.sequences or reserved + sequence.capacity > room.kv_tokens:
                return
            sequence.sought = True
            self._restore_state(pipeline, sequence, then)
            if sequence.restoring:
                held.append(sequence)
                reserved += sequence.capacity

    def _restore_state(
        self, pipeline: Pipeline, sequence: Sequence, then: Callable[[], None]
    ) -> None:
        """Start to give the stages the state of a sequence, from its backup or from disks. It waits until then."""
        if not sequence.may_restore:
            return
        scheduler = self._scheduler
        entry = scheduler.prefixes.find_entry(sequence.tokens)
        held = 0 if entry is None else len(entry.tokens)
        backup = scheduler.backups.kept.get(sequence.seq_id)
        if backup is not None and not (
            pipeline.makes_backups
            and backup.tokens > held
            and total_bytes([backup]) <= self._movable_bytes(backup.tokens - held)
        ):
            backup = None
        searches = pipeline.has_disk and len(sequence.tokens) - held > SMALLEST_ENTRY
        sequence.restoring = bool(backup or searches)
        if sequence.restoring:
            self._background.spawn(self._transfer_state(pipeline, sequence, backup, held, then))

    async def _transfer_state(
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
                async with self._writing:
                    restored = sequence.tokens[:tokens]
                    await pipeline.write_backup(sequence.seq_id, restored, backup.states)
                log.info("backup restored", extra={"epoch": pipeline.epoch, "tokens": tokens})
        except ClusterError as error:
            log.info("backup not restored", extra={"error": str(error)})
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
        if self._speeds and nbytes > self._movable_bytes(gained):
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

    def _movable_bytes(self, tokens: int) -> float:
        """Return the bytes that the network transfers in the time that `tokens` tokens take to compute."""
        return median_low(self._speeds) * self._longest_load(tokens) if self._speeds else 0.0

    async def close(self) -> None:
        """Cancel the transfers."""
        await self._background.close()
