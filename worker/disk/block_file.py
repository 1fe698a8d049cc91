"""A block: the states of some layers after a prefix, in one file of safetensors.

A block has tensors named `layer.index`. Its metadata has the checksum of each tensor, and which layers continue the
block before it. A file is written under a temporary name, synced and renamed, so a reader never sees half of one.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from proto.errors import ProtocolError
from proto.wire import STORED_BYTES, STORED_NAMES

SUFFIX = ".safetensors"
TEMPORARY = ".part"
"""Ending of a file that is being written."""

HEADER_BYTES = 1024
"""Bytes of a header before its tensors, for the metadata. Each tensor takes TENSOR_BYTES more."""

TENSOR_BYTES = 256

READERS = 8
"""Threads that read and check tensors. Both release Python's lock."""

READ_BYTES = 2**22
"""Bytes that a thread reads at once."""

MAX_HEADER = 2**26
"""Bytes. A longer header is damage."""

DTYPES = {**STORED_NAMES, "uint32": "U32", "uint8": "U8"}
"""The types of tensors, by MLX's names, as safetensors names them."""

_NAMES = {stored: name for name, stored in DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """The bytes of a tensor. `dtype` is MLX's name for its type."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of layer number `layer`. With `appends` they continue those of the block before."""

    layer: int
    appends: bool
    tensors: list[Tensor]


class BlockWriter:
    """The writing of a block to `path`, layer by layer. Use it as a context: an error removes the temporary file.

    `tensors` bounds the number of tensors, for the room of the header. Raises OSError for a disk that fails.
    """

    def __init__(self, path: Path, tensors: int) -> None:
        self.path = path
        # Another process may write the same block.
        self._temporary = path.with_name(f"{path.stem}-{os.getpid()}{TEMPORARY}")
        self._room = HEADER_BYTES + TENSOR_BYTES * tensors
        self._header: dict[str, Any] = {}
        self._sums: dict[str, int] = {}
        self._appends: list[int] = []
        self._end = 0

    def __enter__(self) -> BlockWriter:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._file = open(os.open(self._temporary, flags, 0o600), "wb", buffering=0)
        self._file.seek(8 + self._room)
        return self

    def write(self, layer: LayerTensors) -> None:
        """Append the tensors of a layer."""
        if layer.appends:
            self._appends.append(layer.layer)
        for index, tensor in enumerate(layer.tensors):
            name, view = f"{layer.layer}.{index}", memoryview(tensor.data).cast("B")
            self._sums[name] = zlib.crc32(view)
            place = [self._end, self._end + view.nbytes]
            kind = DTYPES[tensor.dtype]
            self._header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": place}
            self._end += view.nbytes
            while view:
                view = view[self._file.write(view) :]

    def finish(self) -> int:
        """Write the header, sync, and rename. Return the bytes of the file."""
        metadata = {"appends": json.dumps(self._appends), "crc32": json.dumps(self._sums)}
        header = json.dumps({"__metadata__": metadata, **self._header}).encode()
        if len(header) > self._room:
            raise OSError(f"the header of {self.path.name} exceeds its room of {self._room} bytes")
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + header.ljust(self._room))
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self.path)
        return 8 + self._room + self._end

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class BlockReader:
    """A block in a file. Raises OSError or ProtocolError for one that is missing, short or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > MAX_HEADER:
                    raise ValueError(f"a header of {length} bytes")
                header: dict[str, Any] = json.loads(file.read(length))
                metadata = header.pop("__metadata__")
                self.appends: frozenset[int] = frozenset(json.loads(metadata["appends"]))
                self._sums: dict[str, int] = json.loads(metadata["crc32"])
                self._tensors = {name: _place(info, 8 + length) for name, info in header.items()}
                self._names = _by_layer(header)
                self._kinds = {
                    name: (_NAMES[info["dtype"]], tuple(info["shape"]))
                    for name, info in header.items()
                }
            except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
                raise _damaged(path, error) from error

    def nbytes(self, layer: int) -> int:
        """Return the bytes of the tensors of `layer`, 0 if it has none here."""
        return sum(self._tensors[name][1] for name in self._names.get(layer, ()))

    def check(self, layers: Collection[int]) -> None:
        """Read the tensors of `layers` and compare their checksums. `load` gets them from the system's memory then.

        On a GPU the checksums of loaded arrays would move them to the host and back. Raises ProtocolError for a file
        that is too short, or has other bytes than those that were written.
        """
        with self.path.open("rb") as file, ThreadPoolExecutor(READERS) as pool:
            names = [name for layer in layers for name in self._names.get(layer, ())]
            for one in [pool.submit(self._check, file.fileno(), name) for name in names]:
                one.result()

    def read(self, layer: int) -> LayerTensors:
        """Return the tensors of `layer`. Raises ProtocolError for damaged ones."""
        tensors = []
        with self.path.open("rb") as file:
            for name in self._names.get(layer, ()):
                start, size = self._tensors[name]
                data = os.pread(file.fileno(), size, start)
                if len(data) != size or zlib.crc32(data) != self._sums.get(name):
                    raise _damaged(self.path, f"other bytes of {name}")
                tensors.append(Tensor(*self._kinds[name], data))
        return LayerTensors(layer, layer in self.appends, tensors)

    def load(self, layers: Iterable[int]) -> dict[int, list[mx.array]]:
        """Return the tensors of each of `layers`, which are checked, as MLX's arrays. Runs on the thread that computes.

        Raises ProtocolError for a file that another process dropped.
        """
        try:
            tensors = mx.load(str(self.path))
            assert isinstance(tensors, dict)
            here = [layer for layer in layers if layer in self._names]
            found = {layer: [tensors[name] for name in self._names[layer]] for layer in here}
            mx.eval(found)
        except (RuntimeError, ValueError, KeyError) as error:
            raise _damaged(self.path, error) from error
        return found

    def _check(self, descriptor: int, name: str) -> None:
        start, size = self._tensors[name]
        buffer, done, checksum = memoryview(bytearray(min(size, READ_BYTES))), 0, 0
        while done < size:
            count = os.preadv(descriptor, [buffer[: size - done]], start + done)
            if count == 0:
                raise _damaged(self.path, "it is too short")
            checksum = zlib.crc32(buffer[:count], checksum)
            done += count
        if checksum != self._sums.get(name):
            raise _damaged(self.path, f"another checksum of {name}")


def _place(info: dict[str, Any], start: int) -> tuple[int, int]:
    """Return the place and the size of a tensor. Raises ValueError if they do not fit its shape."""
    begin, end = map(int, info["data_offsets"])
    if begin < 0 or end - begin != STORED_BYTES[info["dtype"]] * math.prod(map(int, info["shape"])):
        raise ValueError(f"{end - begin} bytes of shape {info['shape']}")
    return start + begin, end - begin


def _by_layer(names: Iterable[str]) -> dict[int, list[str]]:
    """Return the names `layer.index` of each layer, in their order. Raises ValueError for other names."""
    found: dict[int, list[str]] = {}
    for layer, index in sorted(tuple(map(int, name.split(".", 1))) for name in names):
        found.setdefault(layer, []).append(f"{layer}.{index}")
    return found


def _damaged(path: Path, error: object) -> ProtocolError:
    return ProtocolError(f"{path.name} is damaged: {error}")
