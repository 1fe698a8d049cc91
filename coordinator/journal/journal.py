"""The thread that owns the journal's database. Writers queue their changes and never wait for the disk."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from coordinator.journal.database import Database, Retention
from coordinator.journal.record import Record

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH_SECONDS = 0.1
"""Seconds. Time over which changes are collected for one commit, and the tokens that a crash loses."""

RETENTION_SECONDS = 600.0
"""Seconds without a change after which answers that are too old are deleted."""

MEMORY_RETENTION = Retention(nbytes=64 * 2**20)
"""The retention without a file: answers end with the process and may not fill its memory."""


@dataclass(frozen=True)
class _Change:
    """One change or question. `reply` gets the result; without it the change waits for a batch."""

    run: Callable[[Database], Any]
    reply: Future[Any] | None = None


class Journal:
    """The stored answers in `file`, or in memory without one.

    When the file cannot be written, the journal logs one warning and goes on in memory. Methods that write return at
    once. All others wait for the writes before them.
    """

    def __init__(self, file: Path | None = None, retention: Retention | None = None) -> None:
        self._file = file
        self._retention = retention or (MEMORY_RETENTION if file is None else Retention())
        self._changes: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock: int | None = None
        self._older: Database | None = None
        """The file that can no longer be written, for reading."""

    # ---- changes

    def save(self, record: Record) -> None:
        """Write a record, in place of an earlier one with its id."""
        self._queue(_Change(partial(_save, record, self._retain)))

    async def save_now(self, record: Record) -> None:
        """Write a record like `save`, and return when it is committed."""
        await self._ask(partial(_save, record, self._retain))

    def append_tokens(self, answer_id: str, first: int, tokens: tuple[int, ...]) -> None:
        """Write the next tokens of an answer. `first` is the number of tokens before them."""
        self._queue(_Change(lambda database: database.append_tokens(answer_id, first, tokens)))

    async def delete(self, answer_id: str) -> None:
        """Delete a record. Its content is gone from the disk when this returns."""

        def run(database: Database) -> None:
            """Delete the record, also in the file that can no longer be written, if that is possible."""
            database.delete(answer_id)
            if self._older is not None:
                with contextlib.suppress(sqlite3.Error), self._older.transaction():
                    self._older.delete(answer_id)

        await self._ask(run)

    # ---- questions

    async def find(self, answer_id: str) -> Record | None:
        """Return the record with this id, or None."""

        def run(database: Database) -> Record | None:
            """Look in the present database and in the file that can no longer be written."""
            found = database.find(answer_id)
            if found is None and self._older is not None:
                found = self._older.find(answer_id)
            return found

        return await self._ask(run)

    async def unfinished(self) -> list[Record]:
        """Return the answers that have not ended, the oldest first."""
        return await self._ask(lambda database: database.unfinished())

    # ---- life

    async def close(self) -> None:
        """Write what is queued and end the thread."""
        if self._thread is not None:
            self._changes.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _queue(self, change: _Change) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
        self._changes.put(change)

    async def _ask(self, run: Callable[[Database], T]) -> T:
        reply: Future[T] = Future()
        self._queue(_Change(run, reply))
        return await asyncio.wrap_future(reply)

    # ---- the thread

    def _run(self) -> None:
        database = self._open()
        while True:
            batch, last = self._next_batch()
            database = self._apply_batch(database, batch)
            if last:
                database.close()
                return

    def _next_batch(self) -> tuple[list[_Change], bool]:
        """Return the changes of the next commit, and whether they are the last ones. A question ends the wait."""
        batch: list[_Change] = []
        deadline = time.monotonic() + RETENTION_SECONDS
        while True:
            try:
                change = self._changes.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return batch or [_Change(self._retain)], False
            if change is None:
                return batch, True
            if not batch:
                deadline = time.monotonic() + BATCH_SECONDS
            batch.append(change)
            if change.reply is not None:
                return batch, False

    def _apply_batch(self, database: Database, batch: list[_Change]) -> Database:
        """Commit `batch`. Return the database for the next one: another one if this one cannot be written."""
        try:
            try:
                results = _commit(database, batch)
            except sqlite3.Error as error:
                if self._older is not None or self._file is None:
                    raise
                self._warn(f"{self._file} cannot be written: {error}")
                self._older, database = database, Database.in_memory()
                results = _commit(database, batch)
        except Exception as error:  # a bug here: readers must not wait forever
            log.exception("stored answers cannot be kept")
            results = [error] * len(batch)
        for change, result in zip(batch, results, strict=True):
            if change.reply is not None:
                if isinstance(result, Exception):
                    change.reply.set_exception(result)
                else:
                    change.reply.set_result(result)
        return database

    def _retain(self, database: Database) -> None:
        database.delete_old(self._retention)

    def _open(self) -> Database:
        """Return the database in the file, or one in memory if the file cannot be used."""
        if self._file is None:
            return Database.in_memory()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = self._file.with_suffix(".lock")
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            database = Database.open_file(self._file)
            with database.transaction():
                self._retain(database)
        except BlockingIOError:
            self._warn(f"{self._file} is used by another coordinator. Give this one a --state-dir")
        except (OSError, sqlite3.Error) as error:
            self._warn(f"{self._file} cannot be used: {error}")
        else:
            return database
        self._file = None
        return Database.in_memory()

    def _warn(self, reason: str) -> None:
        log.warning(
            "journal off: stored answers are kept in memory and end with this process",
            extra={"reason": reason},
        )


def _save(record: Record, retain: Callable[[Database], None], database: Database) -> None:
    database.save(record)
    if record.ended:
        retain(database)


def _commit(database: Database, batch: list[_Change]) -> list[Any]:
    """Apply all changes in one transaction and return their results."""
    with database.transaction():
        return [change.run(database) for change in batch]
