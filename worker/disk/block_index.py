"""The index of the blocks in a folder: which prefixes they hold, of which layers, and which are dropped first.

Several processes may share a folder. SQLite orders their changes, and a file that another one has dropped is a miss.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from proto.backup import LENGTH_BYTES, length_of, prefix_keys, stems_of
from proto.errors import ProtocolError
from proto.span import Span
from worker.disk.block_file import FORMER_SUFFIX, SUFFIX, TEMPORARY, is_abandoned

log = logging.getLogger(__name__)

VERSION = 3
"""Version of the folder. A folder of a newer version is not used, and the blocks of an older one are dropped."""

BUSY_SECONDS = 2.0
"""Seconds. Bound of the wait for another process that changes the index."""

STALE_SECONDS = 3600.0
"""Seconds. A temporary file that is older is removed, whatever its process does."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    namespace TEXT, key BLOB, first INTEGER, last INTEGER, start INTEGER, length INTEGER, parent BLOB,
    bytes INTEGER, used REAL, file TEXT UNIQUE, PRIMARY KEY (namespace, key, first, last)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON blocks (used, length DESC);
CREATE TABLE IF NOT EXISTS sums (
    namespace TEXT, first INTEGER, last INTEGER, bytes INTEGER, PRIMARY KEY (namespace, first, last)
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON blocks BEGIN
    INSERT INTO sums VALUES (NEW.namespace, NEW.first, NEW.last, NEW.bytes)
        ON CONFLICT DO UPDATE SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON blocks BEGIN
    UPDATE sums SET bytes = bytes - OLD.bytes
        WHERE namespace = OLD.namespace AND first = OLD.first AND last = OLD.last;
END;
"""
"""`sums` are the bytes of all blocks of a namespace with the same layers. No operation reads every block."""

DAMAGED = ("malformed", "not a database")
"""Parts of SQLite's errors for a file that was cut off or overwritten."""


class _OldFolderError(Exception):
    """The folder has blocks of an earlier version."""


def _connect(path: str) -> sqlite3.Connection:
    """Open an index. Raises OSError for a newer version, and sqlite3.Error."""
    database = sqlite3.connect(
        path,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        uri=path.startswith("file:"),
    )
    (found,) = database.execute("PRAGMA user_version").fetchone()
    if found > VERSION:
        raise OSError(f"{path} is of version {found}, and this program knows {VERSION}")
    if 0 < found < VERSION:
        database.close()
        raise _OldFolderError(f"version {found} of {VERSION}")
    if not path.startswith("file:"):
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA recursive_triggers = ON")  # for entries that INSERT OR REPLACE removes
        database.executescript(_SCHEMA)
        database.execute(f"PRAGMA user_version = {VERSION}")
    return database


def _version_of(path: Path) -> int:
    """Return the version of an index on a disk that cannot be written, 0 without one."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as found:
            (version,) = found.execute("PRAGMA user_version").fetchone()
            return int(version)
    except sqlite3.Error:
        return 0


@dataclass(frozen=True)
class Block:
    """The state of the layers `layers` after the prefix `key` of `length` tokens, in `file`.

    The keys and values are those of the tokens from `start` on. The ones before are in a block of the prefix `parent`.
    `namespace` names the checkpoint and everything else that decides the bits.
    """

    namespace: str
    key: bytes
    layers: Span
    start: int
    length: int
    parent: bytes
    file: str


def block_file(namespace: str, key: bytes, layers: Span) -> str:
    """Return the name of the file of a block."""
    return f"{namespace}-{key.hex()}-{layers.start}-{layers.end}{SUFFIX}"


@dataclass(frozen=True)
class Chain:
    """The blocks that have the state of `layers` after a prefix, the first tokens first."""

    layers: Span
    blocks: tuple[Block, ...]


class BlockIndex:
    """The blocks in `folder`, of at most `limit` bytes. Raises OSError or sqlite3.Error for a folder it cannot use."""

    def __init__(self, folder: Path, limit: int, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.limit = limit
        self._clock = clock
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / "index.sqlite"
        try:
            path.touch(mode=0o600)
            self._database = self._opened(path)
        except (OSError, sqlite3.OperationalError) as error:
            if _version_of(path) != VERSION:
                raise
            log.warning("prefixes on disk are only read", extra={"error": str(error)})
            self._database = _connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1")

    def _opened(self, path: Path) -> sqlite3.Connection:
        """Open the index, and a new one in place of one that is damaged or of an earlier version."""
        try:
            self._database = _connect(str(path))
            self._clean_up()
        except (sqlite3.DatabaseError, _OldFolderError) as error:
            old = isinstance(error, _OldFolderError)
            if not old and not any(text in str(error) for text in DAMAGED):
                raise
            log.warning("prefixes on disk dropped: the index is unreadable or old", extra={"error": str(error)})
            for ending in ("", "-wal", "-shm"):
                path.with_name(path.name + ending).unlink(missing_ok=True)
            path.touch(mode=0o600)
            self._database = _connect(str(path))
            self._clean_up()
        return self._database

    def add_block(self, block: Block, nbytes: int) -> bool:
        """Add a block whose file is written. Drop those used least recently to make room.

        Return False, and remove the file, if it exceeds the limit or continues a block that is gone.
        """
        try:
            with self._lock, self._database:
                self._database.execute("BEGIN IMMEDIATE")
                dropped = self._added(block, nbytes)
        except BaseException:
            self._unlink([block.file])  # no limit would count it
            raise
        self._unlink(dropped)
        return block.file not in dropped

    def _added(self, block: Block, nbytes: int) -> list[str]:
        """Add the entry of a block, and return the files to remove, which may be its own."""
        now, dropped = self._clock(), list[str]()
        # The file of a block that was here before is replaced already.
        self._database.execute("DELETE FROM blocks WHERE file = ?", (block.file,))
        if nbytes <= self.limit and self._continues(block, now):
            dropped = self._make_room(nbytes)
        # What it continues may have been dropped to make room.
        if nbytes > self.limit or not self._continues(block, now):
            return [*dropped, block.file]
        place = (block.namespace, block.key, block.layers.start, block.layers.end)
        values = (*place, block.start, block.length, block.parent, nbytes, now, block.file)
        self._database.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        return dropped

    def held(self, namespace: str, tokens: Sequence[int]) -> dict[int, set[int]]:
        """Return the layers that are here after each proper prefix of `tokens`, by its length.

        The cost depends on `tokens`, and not on the blocks of other prompts.
        """
        query = "SELECT first, last, start, parent FROM blocks WHERE namespace = ? AND key = ?"
        held: dict[bytes, set[int]] = {}
        with self._lock:
            lengths = sorted(n for stem in stems_of(tokens) for n in self._lengths(namespace, stem) if n < len(tokens))
            # A block comes after those that it continues, as these are shorter.
            for key in prefix_keys(tokens, lengths):
                for first, last, start, parent in self._database.execute(query, (namespace, key)).fetchall():
                    layers = set(range(first, last))
                    held.setdefault(key, set()).update(layers & held.get(parent, set()) if start else layers)
        return {length_of(key): layers for key, layers in held.items() if layers}

    def _lengths(self, namespace: str, stem: bytes) -> Iterator[int]:
        """Yield the lengths of all prefixes with this stem: at most STEM_TOKENS."""
        query = "SELECT key FROM blocks WHERE namespace = ? AND key > ? AND key < ? ORDER BY key LIMIT 1"
        low, high = stem, stem + b"\xff" * LENGTH_BYTES
        while row := self._database.execute(query, (namespace, low, high)).fetchone():
            yield (length := length_of(row[0]))
            low = stem + (length + 1).to_bytes(LENGTH_BYTES, "big")

    def layer_bytes(self, model: str) -> list[tuple[Span, int]]:
        """Return the bytes of the blocks with the same layers, of all namespaces that begin with `model`."""
        query = "SELECT first, last, SUM(bytes) FROM sums WHERE namespace LIKE ? AND bytes > 0 GROUP BY first, last"
        with self._lock:
            return [(Span(a, b), n) for a, b, n in self._database.execute(query, (f"{model}%",))]

    def chains(self, namespace: str, layers: Span, key: bytes) -> list[Chain]:
        """Return the chains of prefix `key` that have all of `layers` together, or none if a block is missing.

        A layer may be in several blocks, of different cuts of the model. They all have the same bits.
        """
        found: list[Chain] = []
        start = layers.start
        with self._lock:
            while start < layers.end:
                blocks = self._chain_of(namespace, start, key)
                if not blocks:
                    return []
                end = min(layers.end, *(block.layers.end for block in blocks))
                found.append(Chain(Span(start, end), tuple(blocks)))
                start = end
        return found

    def touch(self, blocks: Iterable[Block], now: float | None = None) -> None:
        """Mark blocks as the most recently used, all of them at one time: of a chain the end goes first."""
        now = self._clock() if now is None else now
        with self._lock:
            rows = [(now, file) for file in {block.file for block in blocks}]
            self._database.executemany("UPDATE blocks SET used = ? WHERE file = ?", rows)

    def remove(self, block: Block) -> None:
        """Remove a damaged block."""
        with self._lock:
            self._database.execute("DELETE FROM blocks WHERE file = ?", (block.file,))
        self._unlink([block.file])

    @contextmanager
    def removing(self, block: Block) -> Iterator[None]:
        """Remove `block` if the context finds it damaged, or dropped by another process, and raise OSError."""
        try:
            yield
        except (ProtocolError, FileNotFoundError) as error:
            gone = not (self.folder / block.file).exists()
            with suppress(sqlite3.Error):
                self.remove(block)
            if not gone:
                log.warning("damaged prefix removed", extra={"error": str(error)})
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Close the index. The blocks stay."""
        with self._lock:
            self._database.close()

    # ---- with the lock held

    def _chain_of(self, namespace: str, layer: int, key: bytes) -> list[Block]:
        """Return the blocks of one layer, the first tokens first, or none if one is missing."""
        query = (
            "SELECT first, last, start, length, parent, file FROM blocks"
            " WHERE namespace = ? AND key = ? AND first <= ? AND last > ? ORDER BY start"
        )
        chain: list[Block] = []
        while True:
            row = self._database.execute(query, (namespace, key, layer, layer)).fetchone()
            if row is None:
                return []
            first, last, start, length, parent, file = row
            if chain and length != chain[-1].start:
                return []  # the keys of two prefixes are equal, or the index is damaged
            chain.append(Block(namespace, key, Span(first, last), start, length, parent, file))
            if not start:
                return chain[::-1]
            key = parent

    def _continues(self, block: Block, now: float) -> bool:
        """Return whether the blocks that `block` continues are here, and mark them as used with it."""
        if not block.start:
            return True
        chains = self.chains(block.namespace, block.layers, block.parent)
        self.touch((one for chain in chains for one in chain.blocks), now)
        return bool(chains)

    def _make_room(self, nbytes: int) -> list[str]:
        """Remove the entries used least recently until `nbytes` more fit. Return their files.

        Of blocks that were used at the same time the longest goes first, since it may continue the others.
        """
        (total,) = self._database.execute("SELECT TOTAL(bytes) FROM sums").fetchone()
        excess, files = int(total) + nbytes - self.limit, []
        query = "SELECT bytes, file FROM blocks ORDER BY used, length DESC LIMIT 1"
        while excess > 0 and (row := self._database.execute(query).fetchone()):
            self._database.execute("DELETE FROM blocks WHERE file = ?", row[1:])
            files.append(row[1])
            excess -= row[0]
        return files

    # ---- files

    def _unlink(self, files: Iterable[str]) -> None:
        for file in files:
            (self.folder / file).unlink(missing_ok=True)

    def _clean_up(self) -> None:
        """Remove files that no entry names, entries whose file is gone, and what exceeds the limit."""
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            known = {file for (file,) in self._database.execute("SELECT file FROM blocks")}
            found = [p for p in self.folder.iterdir() if p.suffix in (SUFFIX, FORMER_SUFFIX, TEMPORARY)]
            gone = [(file,) for file in known - {p.name for p in found}]
            self._database.executemany("DELETE FROM blocks WHERE file = ?", gone)
            self._database.execute("DELETE FROM sums")
            sums = "SELECT namespace, first, last, SUM(bytes) FROM blocks GROUP BY namespace, first, last"
            self._database.execute(f"INSERT INTO sums {sums}")
            dropped = self._make_room(0)
        for path in found:
            # A block that another process has renamed and not entered yet is a miss for it later.
            with suppress(FileNotFoundError):
                old = self._clock() - path.stat().st_mtime > STALE_SECONDS
                if path.name not in known and (path.suffix != TEMPORARY or old or is_abandoned(path)):
                    dropped.append(path.name)
        self._unlink(dropped)
