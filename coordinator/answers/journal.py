"""The journal of stored answers: an SQLite database behind a thread, off the path of the tokens."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

import msgpack

from coordinator.text.schemas import Json

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """A stored response: enough to continue it after a restart, and its result once it has ended.

    `owner` identifies the API key that made it. `model` is the fingerprint of the checkpoint. `body` is the client's
    request as JSON. `request` is the engine's request in msgpack's types, with prompt, parameters and seed. A record
    without `request` was stored at its end and cannot be continued. `history` is the conversation. `result` is the
    object that clients retrieve. `events` are the numbered events of the stream. `tokens` are those used so far.
    """

    id: str
    owner: str
    model: str
    created: int
    body: str
    request: Json = field(default_factory=dict)
    history: Json = field(default_factory=dict)
    background: bool = False
    ended: bool = False
    result: Json = field(default_factory=dict)
    events: list[bytes] = field(default_factory=list)
    tokens: tuple[int, ...] = ()


VERSION = 2
"""The version of the tables. A file of another version is not used."""

BUSY_SECONDS = 5.0
"""Seconds. Bound on waiting for another program, such as the sqlite3 shell, that reads the file."""

_TABLES = """
CREATE TABLE answers (
    id TEXT PRIMARY KEY, created INTEGER NOT NULL, ended INTEGER NOT NULL, size INTEGER NOT NULL, content BLOB NOT NULL
) STRICT;
CREATE INDEX answers_by_age ON answers (created);
CREATE TABLE tokens (
    id TEXT NOT NULL, first INTEGER NOT NULL, tokens BLOB NOT NULL, PRIMARY KEY (id, first)
) STRICT, WITHOUT ROWID;
"""


_TOTAL = """
PRAGMA temp_store=MEMORY;
PRAGMA recursive_triggers=ON;
CREATE TEMP TABLE total AS SELECT coalesce(sum(size), 0) AS bytes FROM answers WHERE ended;
CREATE TEMP TRIGGER added AFTER INSERT ON answers WHEN new.ended
    BEGIN UPDATE total SET bytes = bytes + new.size; END;
CREATE TEMP TRIGGER removed AFTER DELETE ON answers WHEN old.ended
    BEGIN UPDATE total SET bytes = bytes - old.size; END;
"""
"""The bytes of the ended answers, summed once for each connection. A transaction that fails restores it."""

KEPT_SECONDS = 30 * 86400
"""Seconds. Maximum age of an ended answer."""

FILE_BYTES, MEMORY_BYTES = 10**9, 64 * 2**20
"""Bytes. Bounds of all ended answers, in a file and in memory. The oldest ones are deleted."""


def open_database(file: Path | None = None) -> sqlite3.Connection:
    """Open or create the tables in `file`, for its owner only, or in memory. Raises OSError or sqlite3.Error."""
    if file is not None:
        # SQLite gives the files beside the database the mode of the database.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        os.fchmod(descriptor, 0o600)
        os.close(descriptor)
    database = sqlite3.connect(file or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):
        raise sqlite3.DatabaseError(f"its version is {version}, this release reads {VERSION}")
    # Deleted content is overwritten, and the file shrinks.
    # A commit survives the end of the process without a flush to the disk, which the loss of power requires only.
    for setting in ("auto_vacuum=FULL", "secure_delete=ON", "journal_mode=WAL", "synchronous=NORMAL"):
        database.execute(f"PRAGMA {setting}")
    if version == 0:
        database.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={VERSION}; COMMIT;")
    database.executescript(_TOTAL)
    return database


def _save(database: sqlite3.Connection, record: Record, most: int) -> None:
    """Write `record`. The end of an answer drops its tokens, and the oldest answers above `most` bytes."""
    content = _pack(record)
    row = (record.id, record.created, record.ended, len(content), content)
    database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", row)
    if not record.ended:
        return
    database.execute("DELETE FROM tokens WHERE id = ?", (record.id,))
    too_old = int(time.time()) - KEPT_SECONDS
    oldest = "SELECT id, created, bytes FROM answers, total WHERE ended ORDER BY created, answers.rowid LIMIT 1"
    while found := database.execute(oldest).fetchone():
        answer_id, created, total = found
        if total <= most and created >= too_old:
            break
        _delete(database, answer_id)


def _delete(database: sqlite3.Connection, answer_id: str) -> None:
    database.execute("DELETE FROM tokens WHERE id = ?", (answer_id,))
    database.execute("DELETE FROM answers WHERE id = ?", (answer_id,))


def _records(database: sqlite3.Connection, query: str, *values: str) -> list[Record]:
    return [_unpack(database, content) for (content,) in database.execute(query, values).fetchall()]


_AS_JSON = ("history", "result")
"""The fields of a record that clients decide. Their numbers and strings may exceed what msgpack can hold."""


def _pack(record: Record) -> bytes:
    content = {f.name: getattr(record, f.name) for f in fields(Record) if f.name != "tokens"}
    content |= {name: json.dumps(content[name]) for name in _AS_JSON}
    return zlib.compress(msgpack.packb(content), 1)


def _unpack(database: sqlite3.Connection, content: bytes) -> Record:
    found: Json = msgpack.unpackb(zlib.decompress(content), strict_map_key=False)
    found |= {name: json.loads(found[name]) for name in _AS_JSON}
    query = "SELECT first, tokens FROM tokens WHERE id = ? ORDER BY first"
    tokens: list[int] = []
    for first, packed in database.execute(query, (found["id"],)):
        if first != len(tokens):
            break
        tokens += struct.unpack(f"<{len(packed) // 4}I", packed)
    return Record(**found, tokens=tuple(tokens))


T = TypeVar("T")

BATCH_SECONDS = 0.1
"""Seconds. Time over which tokens are collected for one commit, and the tokens that a crash loses."""


class Journal:
    """The stored answers in `file`, or in memory without one, up to `most` bytes of ended ones.

    One thread uses the database. It applies each change in a transaction, in the order of the calls. When the file
    cannot be written, the journal logs one warning and goes on in memory without the answers of the file. Methods
    that write return at once.
    """

    def __init__(self, file: Path | None = None, most: int | None = None) -> None:
        self._file = file
        self._most = most or (MEMORY_BYTES if file is None else FILE_BYTES)
        self._thread = ThreadPoolExecutor(1, "journal")
        self._database: sqlite3.Connection | None = None
        self._tokens: list[tuple[str, int, bytes]] = []
        """The rows of tokens that wait for the next commit."""

    def save_answer(self, record: Record) -> Future[None]:
        """Write a record, in place of an earlier one with its id. The result comes when it is committed."""
        return self._submit(lambda database: _save(database, record, self._most))

    def append_tokens(self, answer_id: str, first: int, tokens: tuple[int, ...]) -> None:
        """Write the next tokens of an answer. `first` is the number of tokens before them."""
        if not self._tokens:
            asyncio.get_running_loop().call_later(BATCH_SECONDS, self._write_tokens)
        self._tokens.append((answer_id, first, struct.pack(f"<{len(tokens)}I", *tokens)))

    async def delete(self, answer_id: str) -> None:
        """Delete a record. Its content is gone from the disk when this returns."""
        await self._ask(lambda database: _delete(database, answer_id))
        # The write-ahead log still holds the pages from before the deletion.
        await asyncio.wrap_future(self._thread.submit(self._empty_log))

    async def find(self, answer_id: str) -> Record | None:
        """Return the record with this id, or None."""
        query = "SELECT content FROM answers WHERE id = ?"
        found = await self._ask(lambda database: _records(database, query, answer_id))
        return found[0] if found else None

    async def unfinished(self) -> list[Record]:
        """Return the answers that have not ended, the oldest first."""
        query = "SELECT content FROM answers WHERE NOT ended ORDER BY created, rowid"
        return await self._ask(lambda database: _records(database, query))

    async def close(self) -> None:
        """Write what is queued and end the thread. Later calls change nothing."""
        self._write_tokens()
        await asyncio.to_thread(self._thread.shutdown)
        if self._database is not None:
            self._database.close()

    def _submit(self, run: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Commit the collected tokens and the changes of `run` together, on the thread."""
        tokens, self._tokens = self._tokens, []
        return self._thread.submit(self._commit, tokens, run)

    async def _ask(self, run: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.wrap_future(self._submit(run))

    def _write_tokens(self) -> None:
        if self._tokens:
            self._submit(lambda database: None)

    # ---- the thread

    def _empty_log(self) -> None:
        assert self._database is not None
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _commit(self, tokens: list[tuple[str, int, bytes]], run: Callable[[sqlite3.Connection], T]) -> T:
        """Apply changes in one transaction, in memory if the file cannot be written, and return the result of `run`."""
        try:
            while True:
                try:
                    self._database = self._database or self._open()
                    with self._database:
                        self._database.execute("BEGIN IMMEDIATE")
                        query = "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?)"
                        self._database.executemany(query, tokens)
                        return run(self._database)
                except (OSError, sqlite3.Error) as error:
                    if self._file is None:
                        raise
                    self._leave_file(error)
        except Exception:
            log.exception("stored answers cannot be kept")
            raise

    def _open(self) -> sqlite3.Connection:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return open_database(self._file)

    def _leave_file(self, error: Exception) -> None:
        """Go on in memory, and say so."""
        log.warning(
            "journal off: stored answers are kept in memory and end with this process",
            extra={"reason": f"{self._file}: {error}"},
        )
        if self._database is not None:
            self._database.close()
        self._database, self._file, self._most = None, None, MEMORY_BYTES
