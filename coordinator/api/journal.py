"""The journal of stored answers: an SQLite database behind a thread, off the path of the tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from coordinator.text.calls import Json

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


KEPT_SECONDS = 30 * 86400
"""Seconds. Maximum age of an ended answer."""

FILE_BYTES, MEMORY_BYTES = 10**9, 64 * 2**20
"""Bytes. Bounds of all ended answers, in a file and in memory. The oldest ones are deleted."""


class Database:
    """The journal's tables in a file, or in memory."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._deleted = False

    @classmethod
    def open(cls, file: Path | None = None) -> Database:
        """Open or create the database in `file`, for its owner only, or in memory. Raises OSError or sqlite3.Error."""
        if file is not None:
            # SQLite gives the files beside the database the mode of the database.
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
            os.fchmod(descriptor, 0o600)
            os.close(descriptor)
        place = file or ":memory:"
        connection = sqlite3.connect(place, timeout=BUSY_SECONDS, isolation_level=None)
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(f"its version is {version}, this release reads {VERSION}")
        # Deleted content is overwritten, and the file shrinks.
        for setting in ("auto_vacuum=FULL", "secure_delete=ON", "journal_mode=WAL"):
            connection.execute(f"PRAGMA {setting}")
        # A commit survives the end of the process without a flush to the disk, which the loss of power requires only.
        connection.execute("PRAGMA synchronous=NORMAL")
        if version == 0:
            connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={VERSION}; COMMIT;")
        return cls(connection)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the changes of the block, or none of them if it raises."""
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
        if self._deleted:
            # The log still holds the pages from before the deletion.
            self._deleted = False
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def save_answer(self, record: Record) -> None:
        """Write `record`, in place of an earlier one with its id. The tokens of an ended answer are dropped."""
        content = _pack(record)
        row = (record.id, record.created, record.ended, len(content), content)
        self._connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", row)
        if record.ended:
            self._connection.execute("DELETE FROM tokens WHERE id = ?", (record.id,))

    def append_tokens(self, answer_id: str, first: int, tokens: tuple[int, ...]) -> None:
        """Write the next tokens of an answer. `first` is the number of tokens before them."""
        content = struct.pack(f"<{len(tokens)}I", *tokens)
        self._connection.execute(
            "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?)", (answer_id, first, content)
        )

    def find(self, answer_id: str) -> Record | None:
        """Return the record with this id and its tokens, or None."""
        found = self._rows("SELECT content FROM answers WHERE id = ?", answer_id)
        return self._with_tokens(_unpack(found[0][0])) if found else None

    def unfinished(self) -> list[Record]:
        """Return the answers that have not ended, the oldest first."""
        rows = self._rows("SELECT content FROM answers WHERE NOT ended ORDER BY created, rowid")
        return [self._with_tokens(_unpack(content)) for (content,) in rows]

    def delete(self, answer_id: str) -> None:
        """Delete a record and its tokens."""
        self._connection.execute("DELETE FROM tokens WHERE id = ?", (answer_id,))
        self._connection.execute("DELETE FROM answers WHERE id = ?", (answer_id,))
        self._deleted = True

    def delete_old(self, most: int) -> None:
        """Delete the ended answers older than KEPT_SECONDS, and the oldest until the others have `most` bytes."""
        # The sum runs from the newest answer to the older ones.
        old = self._rows(
            "SELECT id FROM (SELECT id, created, sum(size) OVER (ORDER BY created DESC, rowid DESC) AS total"
            " FROM answers WHERE ended) WHERE total > ? OR created < ?",
            most,
            int(time.time()) - KEPT_SECONDS,
        )
        for (answer_id,) in old:
            self.delete(answer_id)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _rows(self, query: str, *values: object) -> list[Any]:
        return self._connection.execute(query, values).fetchall()

    def _with_tokens(self, record: Record) -> Record:
        query = "SELECT first, tokens FROM tokens WHERE id = ? ORDER BY first"
        tokens: list[int] = []
        for first, content in self._rows(query, record.id):
            if first != len(tokens):
                break
            tokens += struct.unpack(f"<{len(content) // 4}I", content)
        return replace(record, tokens=tuple(tokens))


_AS_JSON = ("history", "result")
"""The fields of a record that clients decide. Their numbers and strings may exceed what msgpack can hold."""


def _pack(record: Record) -> bytes:
    content = {f.name: getattr(record, f.name) for f in fields(Record) if f.name != "tokens"}
    content |= {name: json.dumps(content[name]) for name in _AS_JSON}
    return zlib.compress(msgpack.packb(content), 1)


def _unpack(content: bytes) -> Record:
    found: Json = msgpack.unpackb(zlib.decompress(content), strict_map_key=False)
    found |= {name: json.loads(found[name]) for name in _AS_JSON}
    return Record(**found)


T = TypeVar("T")

BATCH_SECONDS = 0.1
"""Seconds. Time over which tokens are collected for one commit, and the tokens that a crash loses."""


class Journal:
    """The stored answers in `file`, or in memory without one.

    One thread uses the database. It applies each change in a transaction, in the order of the calls. When the file
    cannot be written, the journal logs one warning and goes on in memory without the answers of the file. Methods
    that write return at once.
    """

    def __init__(self, file: Path | None = None, most: int | None = None) -> None:
        self._file = file
        self._most = most or (MEMORY_BYTES if file is None else FILE_BYTES)
        self._thread = ThreadPoolExecutor(1, "journal")
        self._database: Database | None = None
        self._tokens: list[tuple[str, int, tuple[int, ...]]] = []
        """The arguments of `Database.append_tokens` that wait for the next commit."""

    def save_answer(self, record: Record) -> Future[None]:
        """Write a record, in place of an earlier one with its id. The result comes when it is committed."""
        return self._submit(lambda database: self._save(database, record))

    def append_tokens(self, answer_id: str, first: int, tokens: tuple[int, ...]) -> None:
        """Write the next tokens of an answer. `first` is the number of tokens before them."""
        if not self._tokens:
            asyncio.get_running_loop().call_later(BATCH_SECONDS, self._write_tokens)
        self._tokens.append((answer_id, first, tokens))

    async def delete(self, answer_id: str) -> None:
        """Delete a record. Its content is gone from the disk when this returns."""
        await self._ask(lambda database: database.delete(answer_id))

    async def find(self, answer_id: str) -> Record | None:
        """Return the record with this id, or None."""
        return await self._ask(lambda database: database.find(answer_id))

    async def unfinished(self) -> list[Record]:
        """Return the answers that have not ended, the oldest first."""
        return await self._ask(lambda database: database.unfinished())

    async def close(self) -> None:
        """Write what is queued and end the thread. Later calls change nothing."""
        self._write_tokens()
        with contextlib.suppress(RuntimeError):  # raised after the end
            self._thread.submit(self._close_database)
        await asyncio.to_thread(self._thread.shutdown)

    def _submit(self, run: Callable[[Database], T]) -> Future[T]:
        """Commit the collected tokens and the changes of `run` together, on the thread."""
        tokens, self._tokens = self._tokens, []
        return self._thread.submit(self._commit, tokens, run)

    async def _ask(self, run: Callable[[Database], T]) -> T:
        return await asyncio.wrap_future(self._submit(run))

    def _write_tokens(self) -> None:
        if self._tokens:
            self._submit(lambda database: None)

    # ---- the thread

    def _close_database(self) -> None:
        if self._database is not None:
            self._database.close()

    def _save(self, database: Database, record: Record) -> None:
        database.save_answer(record)
        if record.ended:
            database.delete_old(self._most)

    def _commit(
        self, tokens: list[tuple[str, int, tuple[int, ...]]], run: Callable[[Database], T]
    ) -> T:
        """Apply changes in one transaction, in memory if the file cannot be written, and return the result of `run`."""
        try:
            self._database = self._database or self._open()
            try:
                return self._apply(self._database, tokens, run)
            except sqlite3.Error as error:
                if self._file is None:
                    raise
                self._database.close()
                self._database = self._replace_file(error)
                return self._apply(self._database, tokens, run)
        except Exception:
            log.exception("stored answers cannot be kept")
            raise

    def _apply(
        self,
        database: Database,
        tokens: list[tuple[str, int, tuple[int, ...]]],
        run: Callable[[Database], T],
    ) -> T:
        with database.transaction():
            for arguments in tokens:
                database.append_tokens(*arguments)
            return run(database)

    def _open(self) -> Database:
        """Return the database in the file, or one in memory if the file cannot be used."""
        if self._file is None:
            return Database.open()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            return Database.open(self._file)
        except (OSError, sqlite3.Error) as error:
            return self._replace_file(error)

    def _replace_file(self, error: Exception) -> Database:
        """Return a database in memory, and say so."""
        log.warning(
            "journal off: stored answers are kept in memory and end with this process",
            extra={"reason": f"{self._file}: {error}"},
        )
        self._file, self._most = None, MEMORY_BYTES
        return Database.open()
