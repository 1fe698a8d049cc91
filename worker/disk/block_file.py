"""A block: the states of some layers after a prefix, in one file of safetensors.

A tensor of a layer is stored in flat pieces `layer.index.piece`. The metadata has the shapes of the whole tensors, the
checksum of each piece, and which layers continue the block before it. A file is written under a temporary name, synced
and renamed, so a reader never sees half of one.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import struct
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgpack

from mtp.checkpoint.format.shard import TensorInfo, read_header
from proto.errors import ProtocolError
from proto.wire import STATE_NAMES, STORED_BYTES

SUFFIX = ".safetensors"
TEMPORARY = ".part"
"""Ending of a file that is being written."""

HEADER_BYTES = 1024
"""Bytes of a header before its pieces, for the metadata. Each piece takes ENTRY_BYTES more."""

ENTRY_BYTES = 256

TENSORS_PER_LAYER = 8
"""Upper bound, for the room of a header: quantized keys and values have six."""

PIECE_BYTES = 2**23
"""Bytes of a piece.

On CUDA MLX reads each tensor of a file into new memory of the host. The C library maps that anew above 32 MB, and then
the first touch of its pages takes longer than the copies: an H200 had 1.8 GB/s with 62 MB, and 4.5 with 4 to 10.
"""

READERS = 8
"""Threads that read and check pieces. Both release Python's lock."""

_numbers = itertools.count()

_NAMES = {stored: name for name, stored in STATE_NAMES.items()}

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
    """The next bytes, at most PIECE_BYTES, of tensor number `index` of a layer, which has `dtype` and `shape`."""

    layer: int
    appends: bool
    index: int
    dtype: str
    shape: tuple[int, ...]
    data: Any
    """A buffer, which may be an array of MLX."""


class BlockWriter:
    """The writing of a block to `path`, piece by piece. `close` it in any case: that removes the file of half a block.

    `layers` and `nbytes` bound the layers and their bytes, for the room of the header. The file is opened with the
    first piece, or when it is finished. Raises OSError for a disk that fails.
    """

    def __init__(self, path: Path, layers: int, nbytes: int) -> None:
        self.path = path
        # Another process, or another task of this one, may write the same block.
        own = f"{path.stem}-{os.getpid()}-{next(_numbers)}"
        self._temporary = path.with_name(own + TEMPORARY)
        self._room = HEADER_BYTES + ENTRY_BYTES * (TENSORS_PER_LAYER * layers + nbytes // PIECE_BYTES)
        self._header: dict[str, Any] = {}
        self._sums: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._appends: set[int] = set()
        self._place = 0
        """Pieces of the newest tensor."""
        self._end = 0
        self._file: io.FileIO | None = None

    def _opened(self) -> io.FileIO:
        if self._file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            self._file = io.FileIO(os.open(self._temporary, flags, 0o600), "w")
            self._file.seek(8 + self._room)
        return self._file

    def write_pieces(self, pieces: Iterable[Piece]) -> None:
        """Append pieces. Those of a tensor come one after another."""
        for piece in pieces:
            tensor, data = f"{piece.layer}.{piece.index}", memoryview(piece.data)
            view = data.cast("B") if data.nbytes else memoryview(b"")
            self._place = self._place + 1 if tensor in self._shapes else 0
            self._shapes[tensor] = piece.shape
            if piece.appends:
                self._appends.add(piece.layer)
            kind, size, start = STATE_NAMES[piece.dtype], view.nbytes, self._end
            self._end += size
            name, shape = f"{tensor}.{self._place}", [size // STORED_BYTES[kind]]
            place = [start, self._end]
            self._sums[name] = zlib.crc32(view)
            self._header[name] = {"dtype": kind, "shape": shape, "data_offsets": place}
            self._put(view)

    def finish_file(self) -> int:
        """Write the header, sync, and rename. Return the bytes of the file."""
        metadata = {
            "appends": json.dumps(sorted(self._appends)),
            "crc32": json.dumps(self._sums),
            "shapes": json.dumps(self._shapes),
        }
        header = json.dumps({"__metadata__": metadata, **self._header}).encode()
        if len(header) > self._room:
            raise OSError(f"the header of {self.path.name} exceeds its room of {self._room} bytes")
        file = self._opened()
        file.seek(0)
        self._put(memoryview(struct.pack("<Q", self._room) + header.ljust(self._room)))
        os.fsync(file.fileno())
        os.replace(self._temporary, self.path)
        return 8 + self._room + self._end

    def _put(self, view: memoryview) -> None:
        while view:
            view = view[self._opened().write(view) :]

    def close(self) -> None:
        """Close the file, and remove it unless it is finished."""
        if self._file is not None:
            self._file.close()
        self._temporary.unlink(missing_ok=True)


class BlockReader:
    """A block in a file. Raises OSError or ProtocolError for one that is missing, short or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            header = read_header(path)
            self.appends: frozenset[int] = frozenset(json.loads(header.metadata["appends"]))
            self._sums = dict[str, int](json.loads(header.metadata["crc32"]))
            self._places = header.tensors
            self._tensors = _by_layer(header.tensors, json.loads(header.metadata["shapes"]))
        except Exception as error:  # whatever other bytes lead to
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None  # a file that cannot be opened is not damaged
            raise _damaged(path, error) from error

    def nbytes(self, layer: int) -> int:
        """Return the bytes of the tensors of `layer`, 0 if it has none here."""
        return sum(self._places[name].nbytes for name in self._pieces(layer))

    def check(self, layers: Collection[int]) -> None:
        """Read the pieces of `layers` and compare their checksums. `load` gets them from the system's memory then.

        On a GPU the checksums of loaded arrays would move them to the host and back. Raises ProtocolError for a file
        that is too short, or has other bytes than those that were written.
        """
        with self.path.open("rb") as file, ThreadPoolExecutor(READERS) as pool:

            def check(name: str) -> None:
                self._read(file.fileno(), name)

            list(pool.map(check, [name for layer in layers for name in self._pieces(layer)]))

    def load(self, layers: Iterable[int]) -> dict[int, list[mx.array]]:
        """Return the tensors of each of `layers`, which are checked, as MLX's arrays. Runs on the thread that computes.

        Raises ProtocolError for a file that another process dropped.
        """
        try:
            pieces = mx.load(str(self.path))
            assert isinstance(pieces, dict)
            here = [layer for layer in layers if layer in self._tensors]
            found = {n: [stored.joined(pieces) for stored in self._tensors[n]] for n in here}
            mx.eval(found)
        except (RuntimeError, ValueError, KeyError) as error:
            raise _damaged(self.path, error) from error
        return found

    def packed(self, layer: int) -> bytes:
        """Return the tensors of `layer` as the data of a `LayerState`. Raises ProtocolError for damaged ones."""
        with self.path.open("rb") as file:
            found = [
                (one.dtype, one.shape, b"".join(self._read(file.fileno(), name) for name in one.pieces))
                for one in self._tensors.get(layer, ())
            ]
        data: bytes = msgpack.packb(found)
        return data

    def _pieces(self, layer: int) -> Iterator[str]:
        for stored in self._tensors.get(layer, ()):
            yield from stored.pieces

    def _read(self, descriptor: int, name: str) -> bytes:
        place = self._places[name]
        data = os.pread(descriptor, place.nbytes, place.start)
        if len(data) != place.nbytes or zlib.crc32(data) != self._sums.get(name):
            raise _damaged(self.path, f"other bytes of {name}")
        return data


@dataclass(frozen=True)
class _Stored:
    """A tensor of a file, and the names of its pieces in order."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[str, ...]

    def joined(self, pieces: Mapping[str, mx.array]) -> mx.array:
        own = [pieces[name] for name in self.pieces]
        return (own[0] if len(own) == 1 else mx.concatenate(own)).reshape(self.shape)


def _by_layer(header: Mapping[str, TensorInfo], shapes: dict[str, list[int]]) -> dict[int, list[_Stored]]:
    """Return the tensors of each layer in their order. Raises ValueError if pieces do not fit the shapes."""
    pieces: dict[tuple[int, int], list[str]] = {}
    for layer, index, place in sorted(tuple(map(int, name.split("."))) for name in header):
        pieces.setdefault((layer, index), []).append(f"{layer}.{index}.{place}")
    found: dict[int, list[_Stored]] = {}
    for (layer, index), names in pieces.items():
        shape = tuple(map(int, shapes[f"{layer}.{index}"]))
        kinds = {header[name].dtype for name in names}
        count = sum(header[name].shape[0] for name in names)
        if len(kinds) != 1 or min(shape, default=0) < 0 or count != math.prod(shape):
            raise ValueError(f"pieces of tensor {index} of layer {layer} do not fit {shape}")
        found.setdefault(layer, []).append(_Stored(_NAMES[kinds.pop()], shape, tuple(names)))
    return found


def _damaged(path: Path, error: object) -> ProtocolError:
    return ProtocolError(f"{path.name} is damaged: {error}")
