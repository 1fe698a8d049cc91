"""A block: the states of some layers after a prefix, in one file.

The states are in the bytes that travel between processes, one after the other. A table follows them: which layers
continue the block before, and the length and the checksum of each piece. The file ends with the length and the checksum
of the table. It is written under a temporary name, synced and renamed, so a reader never sees half of one.
"""

from __future__ import annotations

import io
import itertools
import os
import struct
import time
import zlib
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from proto.backup import LayerState
from proto.errors import ProtocolError

SUFFIX = ".block"
TEMPORARY = ".part"
"""Ending of a file that is being written."""

FORMER_SUFFIX = ".safetensors"
"""Ending of blocks of earlier versions, which are removed."""

_END = struct.Struct("<QI4s")
_MAGIC = b"blk3"

READERS = 8
"""Threads that read and check pieces. Both release Python's lock."""

_numbers = itertools.count()

_STARTED = time.time()


def is_abandoned(part: Path) -> bool:
    """Return whether the process that wrote the temporary file `part` has ended."""
    *_, pid, _ = f"--{part.stem}".split("-")
    if pid == str(os.getpid()):  # in a container each start may have the same number
        return part.stat().st_mtime < _STARTED
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return False


@dataclass(frozen=True)
class Piece:
    """The next bytes of the state of `layer`, a buffer that may be an array of MLX."""

    layer: int
    appends: bool
    data: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return memoryview(self.data).nbytes if isinstance(self.data, bytes) else int(self.data.nbytes)


class BlockWriter:
    """The writing of a block to `path`, piece by piece. `close` it in any case: that removes the file of half a block.

    The file is opened with the first piece, or when it is finished. Raises OSError for a disk that fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Another process, or another task of this one, may write the same block.
        own = f"{path.stem}-{os.getpid()}-{next(_numbers)}"
        self._temporary = path.with_name(own + TEMPORARY)
        self._table: dict[int, tuple[bool, list[tuple[int, int]]]] = {}
        self._file: io.FileIO | None = None

    def _put(self, view: memoryview) -> None:
        if self._file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            self._file = io.FileIO(os.open(self._temporary, flags, 0o600), "w")
        while view:
            view = view[self._file.write(view) :]

    def write_pieces(self, pieces: Iterable[Piece]) -> None:
        """Append pieces. Those of a layer come one after another."""
        for piece in pieces:
            view = memoryview(piece.data).cast("B")
            self._table.setdefault(piece.layer, (piece.appends, []))[1].append((view.nbytes, zlib.crc32(view)))
            self._put(view)

    def finish_file(self) -> int:
        """Write the table, sync, and rename. Return the bytes of the file."""
        table: bytes = msgpack.packb([(n, *entry) for n, entry in self._table.items()])
        self._put(memoryview(table + _END.pack(len(table), zlib.crc32(table), _MAGIC)))
        assert self._file is not None
        os.fsync(self._file.fileno())
        nbytes = self._file.tell()
        os.replace(self._temporary, self.path)
        return nbytes

    def close(self) -> None:
        """Close the file, and remove it unless it is finished."""
        if self._file is not None:
            self._file.close()
        self._temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Stored:
    """The state of a layer in a file: the place, the bytes and the checksum of each piece."""

    appends: bool
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.pieces)


class BlockReader:
    """A block in a file. Raises OSError or ProtocolError for one that is missing, short or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.layers: dict[int, _Stored] = {}
        with path.open("rb") as file:
            try:
                end = os.fstat(file.fileno()).st_size - _END.size
                length, checksum, magic = _END.unpack(os.pread(file.fileno(), _END.size, max(0, end)))
                table = os.pread(file.fileno(), min(length, end), max(0, end - length))
                if magic != _MAGIC or zlib.crc32(table) != checksum:
                    raise ValueError("another end")
                start = 0
                for layer, appends, found in msgpack.unpackb(table):
                    ends = [*itertools.accumulate((nbytes for nbytes, _ in found), initial=start)]
                    pieces = ((place, *piece) for place, piece in zip(ends, found, strict=False))
                    self.layers[layer], start = _Stored(appends, tuple(pieces)), ends[-1]
                if start != end - length:
                    raise ValueError("another length")
            except (ValueError, TypeError, struct.error) as error:
                raise _damaged(path, error) from error

    @property
    def appends(self) -> set[int]:
        """The layers whose states continue the block before."""
        return {layer for layer, stored in self.layers.items() if stored.appends}

    def nbytes(self, layer: int) -> int:
        """Return the bytes of the state of `layer`, 0 if it has none here."""
        return self.layers[layer].nbytes if layer in self.layers else 0

    def read(self, layers: Collection[int]) -> list[LayerState]:
        """Return those states of `layers` that are here. Raises ProtocolError for bytes that were not written."""
        here = {layer: self.layers[layer] for layer in layers if layer in self.layers}
        states = [LayerState(layer, stored.appends, bytearray(stored.nbytes)) for layer, stored in here.items()]
        with ThreadPoolExecutor(READERS) as pool:
            for state in states:
                left, places = memoryview(state.data), list[tuple[memoryview, int, int]]()
                for start, nbytes, checksum in here[state.layer].pieces:
                    places.append((left[:nbytes], start, checksum))
                    left = left[nbytes:]
                if not all(pool.map(self._fill, places)):
                    raise _damaged(self.path, f"other bytes of layer {state.layer}")
        return states

    def _fill(self, place: tuple[memoryview, int, int]) -> bool:
        """Read a piece, and return whether it has its checksum."""
        view, start, checksum = place
        with io.FileIO(self.path) as file:
            file.seek(start)
            return file.readinto(view) == len(view) and zlib.crc32(view) == checksum


def _damaged(path: Path, error: object) -> ProtocolError:
    return ProtocolError(f"{path.name} is damaged: {error}")
