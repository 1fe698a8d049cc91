"""Prefixes on disk, as a stage writes and reads them: its caches as blocks, and blocks as the backup of a sequence.

A prefix entry that a frame saves is written soon after it, beside the frames: the engine thread copies a few layers at
a time, and another thread writes them. An entry that the stage drops before its turn is not written, and one that is
being written then is finished without pauses. At the end of a plan all entries that wait are written without pauses.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from proto import cluster_pb2 as pb
from proto.backup import LayerState, length_of, prefix_key
from proto.errors import NotReadyError
from proto.span import Span, spans_of
from proto.state_dir import state_dir
from worker.cache.sequence_cache import Border, PrefixEntry
from worker.disk.block_file import BlockReader, BlockWriter, Piece
from worker.disk.block_index import Block, BlockIndex, Chain, block_file
from worker.engine.engine_thread import EngineThread
from worker.engine.stage_backups import STATE_BYTES, ReceivedBackup
from worker.engine.state_codec import PIECE_BYTES, encode_arrays, head_arrays

log = logging.getLogger(__name__)

R = TypeVar("R")

FORMAT = 4
"""Version of the states in blocks and of the kernels that computed them. Blocks of another one are never found."""

CLOSE_SECONDS = 2.0
"""Seconds in which the end of a plan or a process waits for the disk. A dropped entry stays in memory for no longer."""

WRITE_SHARE = 0.02
"""Share of time that writing may take while frames come. An H200 decoded about that much slower: by 2.8 % at .03."""

IDLE_SECONDS = 0.05
"""Seconds without frames after which writing goes on at full speed, for IDLE_BYTES at a time."""

IDLE_BYTES = 2**27

PAUSE_SECONDS = 60.0
"""Seconds without writes after the disk has failed. It may be full, and users free it."""

DISK_ERRORS = (OSError, sqlite3.Error)


@dataclass(frozen=True)
class SavedPrefix:
    """An entry to write. `parent` is the newest border of its sequence before it, whose block it continues.

    The queue holds no entry in memory: the stage does, within its budget. The one that is being written stays for
    CLOSE_SECONDS, and so do all of a plan that ends.
    """

    entry: weakref.ref[PrefixEntry]
    border: Border
    parent: Border | None


def open_index(state: Path | None, limit: int | None) -> BlockIndex | None:
    """Return the index of prefixes of `limit` bytes in the state directory.

    None without a limit, and with a warning if the folder cannot be used.
    """
    if limit is None:
        return None
    folder = state_dir(state) / "prefixes"
    try:
        return BlockIndex(folder, limit)
    except DISK_ERRORS as error:
        log.warning("no prefixes on disk", extra={"folder": str(folder), "error": str(error)})
        return None


def layer_bytes(index: BlockIndex, fingerprint: str) -> list[tuple[Span, int]]:
    """Return the bytes of the prefixes of a checkpoint on disk, by their layers. A disk that fails has none."""
    try:
        return index.layer_bytes(model_prefix(fingerprint))
    except DISK_ERRORS as error:
        log.warning("prefixes not found", extra={"error": str(error)})
        return []


def model_prefix(fingerprint: str) -> str:
    """Return the beginning of the namespaces of a checkpoint."""
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:8]


def namespace_of(fingerprint: str, *facts: object) -> str:
    """Return the name of everything besides the tokens that decides the bits of a state, for a checkpoint."""
    digest = hashlib.sha256(json.dumps([FORMAT, fingerprint, *map(str, facts)]).encode())
    return model_prefix(fingerprint) + digest.hexdigest()[:16]


@dataclass
class StagePrefixes:
    """The prefixes of one stage on disk. `layers` are its layers, and the number after the last one for the MTP head.

    `save_soon` runs on the engine thread, everything else on the event loop.
    """

    index: BlockIndex
    namespace: str
    layers: Span
    thread: EngineThread
    _queued: dict[bytes, PrefixEntry | None] = field(default_factory=dict)
    """Prefixes that wait to be written, each with the entry of a plan that has ended."""
    _queue: deque[SavedPrefix] = field(default_factory=deque)
    _writer: asyncio.Task[None] | None = None
    _paused_until: float = 0.0
    _closing: bool = False

    async def close(self) -> None:
        """Write what waits, for at most CLOSE_SECONDS. A block that is not complete then is not kept."""
        self._closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                if self.thread.alive:
                    await self.thread.call(lambda: None)  # frames that the thread has got may save more
                if self._writer is not None:
                    await asyncio.wait({self._writer})
        if self._writer is not None:
            self._queue.clear()
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    # ---- writing

    def save_soon(self, entry: PrefixEntry, parent: Border | None) -> None:
        """Write an unknown prefix entry beside the next frames. `parent` is the border of its sequence before it."""
        self.thread.post(self._enqueue, SavedPrefix(weakref.ref(entry), entry.border, parent))

    def _enqueue(self, saved: SavedPrefix) -> None:
        if saved.border.key in self._queued or time.monotonic() < self._paused_until:
            return
        self._queued[saved.border.key] = None
        self._queue.append(saved)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all(), name="prefix disk")

    def hold_waiting(self, entries: Iterable[PrefixEntry]) -> None:
        """Keep those of `entries` that wait to be written, as their plan ends, for at most CLOSE_SECONDS."""
        self.thread.post(self._hold, [*entries])

    def _hold(self, entries: list[PrefixEntry]) -> None:
        for entry in entries:
            if entry.border.key in self._queued:
                self._queued[entry.border.key] = entry
        asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._release)

    def _release(self) -> None:
        self._queued = dict.fromkeys(self._queued)

    def _is_held(self, saved: SavedPrefix) -> bool:
        """Return whether a running plan has the entry in memory."""
        return saved.entry() is not None and self._queued.get(saved.border.key) is None

    async def _write_all(self) -> None:
        while self._queue:
            saved = self._queue.popleft()
            try:
                await self._write(saved)
            except DISK_ERRORS as error:
                self._paused_until = time.monotonic() + PAUSE_SECONDS
                log.warning("prefix not written", extra={"seconds": PAUSE_SECONDS, "error": str(error)})
            except Exception:  # a bug here costs this prefix, and not the next ones
                log.exception("prefix not written")
            self._queued.pop(saved.border.key, None)

    async def _write(self, saved: SavedPrefix) -> None:
        """Write a block, unless the disk has the prefix already or memory has it no more."""
        border, parent, entry = saved.border, saved.parent, saved.entry()
        if entry is None or await self._chains(border.key):
            return
        entry = replace(entry)  # the caches alone, so that `saved` tells when the stage has dropped them
        start, before = 0, b""  # without the blocks of the parent, this one has all tokens
        if parent is not None and await self._chains(parent.key):
            start, before = parent.length, parent.key
        name = block_file(self.namespace, border.key, self.layers)
        writer = BlockWriter(self.index.folder / name)
        block = Block(self.namespace, border.key, self.layers, start, border.length, before, name)
        try:
            take = partial(_take, _pieces(entry, self.layers, start))
            del entry
            free, more, held = 0, True, time.monotonic()  # `free` are bytes before the next rest
            while more:
                held = time.monotonic() if self._is_held(saved) else held
                if time.monotonic() - held > CLOSE_SECONDS:
                    log.info("prefix not written: it left memory", extra={"tokens": border.length})
                    return
                pieces, more = await self.thread.call(take)
                started = time.monotonic()
                await _whole(writer.write_pieces, pieces)
                free -= sum(piece.nbytes for piece in pieces)
                if free <= 0 and more:
                    held_still = partial(self._is_held, saved)
                    free = IDLE_BYTES if await self._rest(time.monotonic() - started, held_still) else 0
            # Together, so that a cancelled task leaves no file without an entry.
            await _whole(lambda: self.index.add_block(block, writer.finish_file()))
        finally:  # a slow disk must not hold up the event loop
            await asyncio.shield(asyncio.to_thread(writer.close))

    async def _rest(self, worked: float, is_held: Callable[[], bool] = lambda: True) -> bool:
        """Let frames have the machine after `worked` seconds of writing.

        Return True if none came for IDLE_SECONDS, or if the stage has dropped the entry.
        """
        end = time.monotonic() + worked * (1 / WRITE_SHARE - 1)
        while time.monotonic() < end and not self._closing:
            if not is_held():
                return True
            busy = self.thread.busy_us
            await asyncio.sleep(IDLE_SECONDS)
            if self.thread.busy_us == busy:
                return True
        return self._closing

    # ---- reading

    async def find(self, tokens: Sequence[int]) -> pb.PrefixReply:
        """Return which proper prefixes of `tokens` are on the disk, with all layers of the stage."""
        held: dict[int, set[int]] = {}
        try:
            held = await asyncio.to_thread(self.index.held, self.namespace, tokens)
        except DISK_ERRORS as error:
            log.warning("prefixes not found", extra={"error": str(error)})
        return pb.PrefixReply(
            lengths=[n for n, layers in held.items() if layers.issuperset(self.layers)],
            layers=self.layers,
            namespace=self.namespace,
            held=[pb.HeldPrefix(length=n, layers=sorted(layers)) for n, layers in held.items()],
        )

    async def read_states(self, key: bytes, layers: Span) -> AsyncIterator[list[LayerState]]:
        """Yield the states of `layers` after the prefix `key`, STATE_BYTES at a time, the next ones read ahead.

        Raises NotReadyError if they are not here any more, or damaged.
        """
        ahead: asyncio.Task[list[LayerState]] | None = None
        try:
            chains = await asyncio.to_thread(self.index.chains, self.namespace, layers, key)
            if not chains:
                raise NotReadyError(f"layers {layers} of a prefix of {length_of(key)} tokens are not on this disk")
            for chain in chains:
                parts = await asyncio.to_thread(self._parts_of, chain)
                for span in _together(parts, chain.layers):
                    before, ahead = ahead, asyncio.create_task(asyncio.to_thread(self._read, parts, span))
                    if before is not None:
                        yield await before
            assert ahead is not None
            yield await ahead
            blocks = [block for chain in chains for block in chain.blocks]
            with suppress(sqlite3.Error):  # of a disk that is full
                await asyncio.to_thread(self.index.touch, blocks)
        except DISK_ERRORS as error:
            raise NotReadyError(f"the prefix cannot be read: {error}") from error
        finally:
            if ahead is not None:
                await asyncio.gather(ahead, return_exceptions=True)

    async def load(self, tokens: Sequence[int], given: Collection[int] = ()) -> AsyncIterator[ReceivedBackup]:
        """Yield the state after `tokens` in parts, without the layers `given`. Raises NotReadyError."""
        started = time.monotonic()
        for missing in spans_of({*self.layers} - {*given}):
            async for states in self.read_states(prefix_key(tokens), missing):
                yield ReceivedBackup.of(tokens, states, from_disk=True)
        seconds = round(time.monotonic() - started, 3)
        log.info("prefix read from disk", extra={"tokens": len(tokens), "seconds": seconds})

    async def _chains(self, key: bytes) -> list[Chain]:
        """Return the blocks of prefix `key`, or none if one is missing."""
        return await asyncio.to_thread(self.index.chains, self.namespace, self.layers, key)

    def _parts_of(self, chain: Chain) -> list[_Part]:
        """Return the blocks of a chain, the first tokens first. Only the last block has states that do not append."""
        found: list[_Part] = []
        for block in chain.blocks:
            with self.index.removing(block):
                reader = BlockReader(self.index.folder / block.file)
                wanted = set(chain.layers)
                if block is not chain.blocks[-1]:
                    wanted &= reader.appends
            found.append(_Part(block, reader, wanted))
        return found

    def _read(self, parts: Sequence[_Part], layers: Iterable[int]) -> list[LayerState]:
        """Read and check `layers`. Runs on a thread of its own."""
        states: list[LayerState] = []
        for part in parts:
            with self.index.removing(part.block):
                states += part.reader.read([layer for layer in layers if layer in part.wanted])
        return states


async def _whole(function: Callable[..., R], *arguments: Any) -> R:
    """Run `function` in a thread. A cancelled task waits for it, so that no file is closed while it is used."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:  # perhaps not the first
            cancelled = error
    failed = running.exception()
    if cancelled or failed:
        raise cancelled or failed  # type: ignore[misc]
    return running.result()


@dataclass(frozen=True)
class _Part:
    """A block of a chain, and the layers that are wanted from it."""

    block: Block
    reader: BlockReader
    wanted: set[int]


def _together(parts: Sequence[_Part], layers: Span) -> Iterator[Span]:
    """Yield the layers in spans of about STATE_BYTES."""
    start, total = layers.start, 0
    for layer in layers:
        total += sum(part.reader.nbytes(layer) for part in parts if layer in part.wanted)
        if total >= STATE_BYTES or layer == layers.end - 1:
            yield Span(start, layer + 1)
            start, total = layer + 1, 0


def _pieces(entry: PrefixEntry, layers: Span, start: int) -> Iterator[Piece]:
    """Yield the pieces of the tokens from `start` on, perhaps unfinished. Runs on the engine thread."""
    for layer, cache in zip(layers, entry.layers, strict=False):
        for data in encode_arrays(cache.backup_arrays(start)):
            yield Piece(layer, cache.appends, data)
    if entry.last_stage is not None and entry.last_stage.head is not None:
        for data in encode_arrays(head_arrays(entry.last_stage.head)):
            yield Piece(layers.end - 1, False, data)


def _take(pieces: Iterator[Piece]) -> tuple[list[Piece], bool]:
    """Return about PIECE_BYTES, perhaps unfinished, and whether more may follow. Runs on the engine thread."""
    taken, more = list[Piece](), False
    for piece in pieces:
        taken.append(piece)
        if more := sum(one.nbytes for one in taken) >= PIECE_BYTES:
            break
    mx.async_eval([piece.data for piece in taken if isinstance(piece.data, mx.array)])
    return taken, more
