"""The header of a safetensors file: its tensors and their places.

Format: header length (u64, little endian), JSON header, tensor bytes. Offsets in the header count from the
end of the header; `TensorInfo.start` counts from the start of the file.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proto.dtype import STORED_BYTES
from proto.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""Bytes. Largest header accepted; the safetensors library has the same limit."""

_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor: `nbytes` bytes from byte `start` of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The tensors of a file by name, and its free-form metadata."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(file: Path) -> Header:
    """Read the header of `file`.

    Raises CheckpointError, naming the file, when it is missing, is not safetensors or is truncated.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(_LENGTH.size)
            length = header_bytes(file, prefix, size)
            return parse_header(file, stream.read(length), size)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error


def header_bytes(file: Path, prefix: bytes, size: int) -> int:
    """Return the length of the JSON header in bytes.

    `prefix` are the first 8 bytes of the file, `size` is its size. Raises CheckpointError when the file is too short,
    is not safetensors or is truncated.
    """
    if len(prefix) < _LENGTH.size:
        raise CheckpointError(
            f"{file}: {size} bytes are too short for a safetensors file. Download it again."
        )
    (length,) = _LENGTH.unpack(prefix[: _LENGTH.size])
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: not a safetensors file (a header of {length} bytes); it may be a Git LFS pointer. "
            "Fetch it with git lfs pull or hf download."
        )
    if _LENGTH.size + length > size:
        raise _truncated(file, _LENGTH.size + length, size)
    return int(length)


def parse_header(file: Path, text: bytes, size: int) -> Header:
    """Parse and check the JSON header `text` of a file of `size` bytes.

    Raises CheckpointError, naming the file, for an invalid header or a truncated file.
    """
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: the header is not JSON: {error}. Download the file again."
        ) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: the header is not a JSON object. Download the file again.")
    metadata = entries.pop("__metadata__", None)
    first = _LENGTH.size + len(text)
    tensors = {name: _tensor(file, name, entry, first) for name, entry in entries.items()}
    needed = max((info.start + info.nbytes for info in tensors.values()), default=first)
    if needed > size:
        raise _truncated(file, needed, size)
    return Header(tensors, metadata if isinstance(metadata, dict) else {})


def _tensor(file: Path, name: str, entry: Any, first: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        itemsize = STORED_BYTES[dtype]
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, end))
        if whole and end - start == itemsize * math.prod(shape):
            return TensorInfo(file, dtype, shape, first + start, end - start)
    except (KeyError, TypeError, ValueError):
        pass
    raise CheckpointError(f"{file}: the header entry for {name!r:.120} is invalid: {entry!r:.120}")


def _truncated(file: Path, needed: int, size: int) -> CheckpointError:
    return CheckpointError(
        f"{file}: truncated: {size} bytes of at least {needed}. Download or copy it again."
    )
