"""Files that are written piece by piece and resumed after any interruption, such as safetensors files.

A file grows under `NAME.part` and gets its name when it is complete and on the disk. Downloads and transfers continue
after the length of a part file. A hash of the whole content finds bytes that a power failure lost. Where there is none,
the file is written from its beginning.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from proto.errors import CheckpointError
from proto.state_dir import replace_file
from proto.terminal.progress import format_size
from proto.wire import STORED_BYTES

MAX_HEADER_BYTES = 100_000_000
"""Bytes. Largest header accepted; the safetensors library has the same limit."""

_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size
"""Bytes of the length of the header, which begins a file."""


def parse_json_object(content: bytes, source: str) -> dict[str, Any]:
    """Return the object in `content`. Raises CheckpointError, naming `source`, for invalid JSON or another value."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: holds {type(value).__name__}, not an object")
    return value


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor: `nbytes` bytes from byte `start` of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    stored: str = ""
    """The name in the file, where the checkpoint has the tensor under another name."""


@dataclass(frozen=True)
class Header:
    """The tensors of a file by name, and its free-form metadata."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(file: Path) -> Header:
    """Read the header of `file`. Raises CheckpointError for a file that is missing, truncated or not safetensors."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(_LENGTH.size)
            length = header_bytes(file, prefix, size)
            return parse_header(file, stream.read(length), size)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error


def header_bytes(file: Path, prefix: bytes, size: int) -> int:
    """Return the length of the JSON header of a file of `size` bytes from its `prefix`. Raises CheckpointError."""
    if len(prefix) < _LENGTH.size:
        raise _truncated(file, _LENGTH.size, size)
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
    """Parse the JSON header `text` of a file of `size` bytes. Raises CheckpointError, also for a truncated file."""
    entries = parse_json_object(text, f"{file}: the header")
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
    return CheckpointError(f"{file}: truncated: {size} bytes of at least {needed}. Download or copy it again.")


Buffer = bytes | bytearray | memoryview

PIECE_BYTES = 1024 * 1024
"""Bytes read from a file at once."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file to write. `dtype` is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return STORED_BYTES[self.dtype] * math.prod(self.shape)


def encode_header(entries: Sequence[Entry], form: str) -> bytes:
    """Return the length and JSON header of a file that holds `entries` in order; `form` is `pt` or `mlx`."""
    header: dict[str, object] = {"__metadata__": {"format": form}}
    start = 0
    for entry in entries:
        place = {"shape": list(entry.shape), "data_offsets": [start, start + entry.nbytes]}
        header[entry.name] = {"dtype": entry.dtype, **place}
        start += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the first tensor is aligned
    return _LENGTH.pack(len(text)) + text


class BusyFileError(CheckpointError):
    """The file is being written by another process."""


class PartFile:
    """A context manager that writes `nbytes` bytes after `header` into the file `path`, from one process at a time.

    `written` counts the bytes without the header. Entering it continues a part file with the same header. Leaving it
    keeps the part file, unless the file is complete. Errors of the file system become CheckpointErrors.
    """

    def __init__(self, path: Path, nbytes: int, header: bytes = b"") -> None:
        self.path = path
        self.nbytes = nbytes
        self.written = 0
        self._header = header
        self._part = path.with_name(f"{path.name}.part")
        self._file = -1

    def complete(self, write_rest: Callable[[], object], wait: Callable[[], object] | None = None) -> None:
        """Complete the file by one call of `write_rest`, which writes all bytes after the first `written`.

        While another process writes the file, call `wait` repeatedly, or raise BusyFileError without it.
        """
        while not self.is_finished():
            try:
                with self:
                    # Another process may have finished it before this one got the lock.
                    if self.is_finished():
                        self._part.unlink(missing_ok=True)
                    else:
                        write_rest()
                        self._finish()
            except BusyFileError:
                if wait is None:
                    raise
                wait()

    def is_finished(self) -> bool:
        """Return whether the file is complete."""
        return self.path.exists()

    def missing_bytes(self) -> int:
        """Return an estimate of the bytes still to write, from the size of the part file."""
        try:
            there = self._part.stat().st_size - len(self._header)
        except FileNotFoundError:  # there is none yet, or another writer has just finished the file
            there = 0
        return self.nbytes - max(0, min(there, self.nbytes))

    def __enter__(self) -> Self:
        """Open and lock the part file. Raises BusyFileError while another process writes the file."""
        with self._errors():
            self._file = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._lock()
                if os.pread(self._file, len(self._header), 0) == self._header:
                    size = os.fstat(self._file).st_size
                    self.rewind(min(size - len(self._header), self.nbytes))
                else:
                    os.ftruncate(self._file, 0)
                    self._write(self._header)
            except BaseException:
                os.close(self._file)  # this releases the lock too
                raise
        return self

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(self._file).st_ino == self._part.stat().st_ino
        except (BlockingIOError, FileNotFoundError):
            mine = False  # another process holds the lock, or has just finished the file
        if not mine:
            raise BusyFileError(f"{self.path}: another process is writing this file. Wait until it ends.")

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def write(self, data: Buffer) -> None:
        """Append bytes."""
        with self._errors():
            self._write(data)
        self.written += len(data)

    def _write(self, data: Buffer) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def read_back(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes `[start, end)`, as far as they are written."""
        end = min(end, self.written)
        for at in range(start, end, PIECE_BYTES):
            yield os.pread(self._file, min(PIECE_BYTES, end - at), len(self._header) + at)

    def rewind(self, written: int) -> None:
        """Discard all bytes after the first `written`."""
        os.ftruncate(self._file, len(self._header) + written)
        os.lseek(self._file, 0, os.SEEK_END)
        self.written = written

    def _finish(self) -> None:
        assert self.written == self.nbytes, f"{self.path}: {self.written} of {self.nbytes} bytes"
        with self._errors():
            os.fsync(self._file)
            self._part.replace(self.path)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise CheckpointError(f"{self._part}: cannot be written: {error.strerror or error}") from error
            rest = format_size(self.nbytes - self.written)
            raise CheckpointError(
                f"{self.path.parent}: the disk is full, and {self.path.name} needs {rest} more. Free some space and "
                "repeat the command.",
                public="a disk is full",
            ) from error


class ShardWriter(PartFile):
    """The writer of a safetensors file with the tensors `entries`. `form` is `pt` or `mlx`."""

    def __init__(self, path: Path, entries: Sequence[Entry], form: str = "mlx") -> None:
        super().__init__(path, sum(entry.nbytes for entry in entries), encode_header(entries, form))
        self.entries = tuple(entries)

    def is_finished(self) -> bool:
        """Return whether `path` exists with exactly these tensors and the right size."""
        try:
            return self.path.is_file() and read_header(self.path).tensors == self.tensors()
        except CheckpointError:
            return False

    def tensors(self) -> dict[str, TensorInfo]:
        """Return the place of each tensor in the finished file."""
        size = len(self._header) + self.nbytes
        return parse_header(self.path, self._header[LENGTH_BYTES:], size).tensors


def read_file(file: Path, start: int, end: int, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """Yield the bytes `[start, end)` of a file. Raises CheckpointError when it cannot be read or is too short."""
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            while start < end:
                piece = stream.read(min(piece_bytes, end - start))
                if not piece:
                    raise CheckpointError(f"{file}: truncated. Remove it, and download it again.")
                start += len(piece)
                yield piece
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a small file atomically, even when several processes write it. Raises CheckpointError."""
    try:
        replace_file(path, data, 0o644)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error


def check_free_space(path: Path, needed: int) -> None:
    """Raise CheckpointError unless the disk under `path` has `needed` bytes left."""
    free = shutil.disk_usage(path).free
    if needed > free:
        raise CheckpointError(
            f"{path}: {format_size(needed)} are needed, and the disk has {format_size(free)} left. Free some space, "
            "or choose another disk (HF_HOME for downloads).",
            public="a disk is full",
        )
