"""The tables of the journal and their statements. All methods block and run on one thread."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgpack

from coordinator.journal.record import Record

VERSION = 1
"""The version of the tables. A file of another version is not used."""

BUSY_SECONDS = 5.0
"""Seconds. Bound on waiting for another program, such as the sqlite3 shell, that reads the file."""

LARGE_INT = 1
"""Code of msgpack's extension for integers of more than 64 bits."""

_TABLES = """
CREATE TABLE answers (
    id TEXT PRIMARY KEY, created INTEGER NOT NULL, ended INTEGER NOT NULL, size INTEGER NOT NULL, content BLOB NOT NULL
) STRICT;
CREATE INDEX answers_by_age ON answers (created);
CREATE TABLE tokens (
    id TEXT NOT NULL, first INTEGER NOT NULL, tokens BLOB NOT NULL, PRIMARY KEY (id, first)
) STRICT, WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Retention:
    """The limits of the journal: the age of an answer in seconds, and the bytes of all ended answers."""

    seconds: float = 30 * 86400.0
    nbytes: int = 10**9


class Database:
    """The journal's tables in a file, or in memory."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._deleted = False

    @classmethod
    def open_file(cls, file: Path) -> Database:
        """Open or create the database in `file`, readable by its owner only.

        Raises OSError or sqlite3.Error for a file that cannot be used.
        """
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # SQLite gives the files beside the database the mode of the database.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        os.fchmod(descriptor, 0o600)
        os.close(descriptor)
        return cls._prepare(sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None))

    @classmethod
    def in_memory(cls) -> Database:
        """Return an empty database that ends with the process."""
        return cls._prepare(sqlite3.connect(":memory:", isolation_level=None))

    @classmethod
    def _prepare(cls, connection: sqlite3.Connection) -> Database:
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
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        if self._deleted:
            # The log still holds the pages from before the deletion.
            self._deleted = False
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def save(self, record: Record) -> None:
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
        found = self._connection.execute(
            "SELECT content FROM answers WHERE id = ?", (answer_id,)
        ).fetchone()
        return None if found is None else self._with_tokens(_unpack(found[0]))

    def count(self) -> int:
        """Return the number of records."""
        (count,) = self._connection.execute("SELECT count(*) FROM answers").fetchone()
        return int(count)

    def unfinished(self) -> list[Record]:
        """Return the answers that have not ended, the oldest first."""
        rows = self._connection.execute(
            "SELECT content FROM answers WHERE NOT ended ORDER BY created, rowid"
        ).fetchall()
        return [self._with_tokens(_unpack(content)) for (content,) in rows]

    def delete(self, answer_id: str) -> None:
        """Delete a record and its tokens."""
        self._connection.execute("DELETE FROM tokens WHERE id = ?", (answer_id,))
        self._connection.execute("DELETE FROM answers WHERE id = ?", (answer_id,))
        self._deleted = True

    def delete_old(self, retention: Retention) -> None:
        """Delete the answers that exceed the retention: by age, and the oldest ended ones by size."""
        oldest = int(time.time() - retention.seconds)
        old = self._connection.execute(
            "SELECT id FROM answers WHERE ended AND created < ?", (oldest,)
        ).fetchall()
        # The sum runs from the newest answer to the older ones.
        large = self._connection.execute(
            "SELECT id FROM (SELECT id, sum(size) OVER (ORDER BY created DESC, rowid DESC) AS total FROM answers"
            " WHERE ended) WHERE total > ?",
            (retention.nbytes,),
        ).fetchall()
        for (answer_id,) in {*old, *large}:
            self.delete(answer_id)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _with_tokens(self, record: Record) -> Record:
        rows = self._connection.execute(
            "SELECT first, tokens FROM tokens WHERE id = ? ORDER BY first", (record.id,)
        ).fetchall()
        tokens: list[int] = []
        for first, content in rows:
            if first != len(tokens):
                break
            tokens += struct.unpack(f"<{len(content) // 4}I", content)
        return replace(record, tokens=tuple(tokens))


def _pack(record: Record) -> bytes:
    content = {f.name: getattr(record, f.name) for f in fields(Record) if f.name != "tokens"}
    packed: bytes = msgpack.packb(content, default=_large_int, unicode_errors="surrogatepass")
    return zlib.compress(packed, 1)


def _unpack(content: bytes) -> Record:
    found: dict[str, Any] = msgpack.unpackb(
        zlib.decompress(content),
        strict_map_key=False,
        ext_hook=_from_extension,
        unicode_errors="surrogatepass",
    )
    return Record(
        **{**found, "requests": tuple(found["requests"]), "events": tuple(found["events"])}
    )


def _large_int(value: object) -> msgpack.ExtType:
    """Return an integer of more than 64 bits as an extension. JSON permits them, such as in a schema."""
    if not isinstance(value, int):
        raise TypeError(f"a record of the journal has a {type(value).__name__}")
    size = value.bit_length() // 8 + 1
    return msgpack.ExtType(LARGE_INT, value.to_bytes(size, "little", signed=True))


def _from_extension(code: int, data: bytes) -> int:
    if code != LARGE_INT:
        raise ValueError(f"a record of the journal has an extension {code}")
    return int.from_bytes(data, "little", signed=True)
