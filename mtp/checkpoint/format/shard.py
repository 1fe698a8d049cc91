"""A safetensors file that is written tensor by tensor, so that only one tensor is in memory.

The file grows under `NAME.part` and gets its name when it is complete and on the disk. So a file with the final name
is complete, and no program reads a part file as a checkpoint. Names, dtypes and shapes are known before the first
byte, so the header comes first. The length of an interrupted file tells how much of it was written.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from mtp.checkpoint.format.header import TensorInfo, read_header
from proto.dtype import STORED_BYTES
from proto.errors import CheckpointError
from proto.terminal.size import format_size

Buffer = bytes | bytearray | memoryview

_ALIGNMENT = 8
"""Bytes. The safetensors format starts the first tensor at a multiple of this."""


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
        end = start + entry.nbytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


class BusyFileError(CheckpointError):
    """The file is being written by another process."""


class ShardWriter:
    """A context manager that writes the file `path`. It leaves the part file on the disk unless `finish` was called.

    `written` counts the bytes of tensors, without the header. Every error of the file system is raised as a
    CheckpointError that says what to do.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], form: str = "mlx") -> None:
        self.path = path
        self.entries = tuple(entries)
        self.nbytes = sum(entry.nbytes for entry in entries)
        self.written = 0
        self._header = encode_header(entries, form)
        self._part = path.with_name(f"{path.name}.part")
        self._file = -1

    def is_finished(self) -> bool:
        """Return whether `path` exists with exactly these tensors and the right size."""
        try:
            return self.path.is_file() and read_header(self.path).tensors == self.tensors()
        except CheckpointError:
            return False

    def missing_bytes(self) -> int:
        """Return an estimate of the bytes still to write, from the size of the part file."""
        try:
            there = self._part.stat().st_size - len(self._header)
        except FileNotFoundError:  # there is none yet, or another writer has just finished the file
            there = 0
        return self.nbytes - max(0, min(there, self.nbytes))

    def tensors(self) -> dict[str, TensorInfo]:
        """Return the place of each tensor in the finished file."""
        found: dict[str, TensorInfo] = {}
        start = len(self._header)
        for entry in self.entries:
            found[entry.name] = TensorInfo(self.path, entry.dtype, entry.shape, start, entry.nbytes)
            start += entry.nbytes
        return found

    def __enter__(self) -> ShardWriter:
        """Open the part file. A part file with the same header is continued after its `written` bytes.

        Raises BusyFileError while another process writes the file.
        """
        try:
            self._file = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._begin()
            except BaseException:
                os.close(self._file)  # this releases the lock too
                raise
        except OSError as error:
            raise self._error(error) from error
        return self

    def _begin(self) -> None:
        self._lock()
        if os.pread(self._file, len(self._header), 0) == self._header:
            size = os.fstat(self._file).st_size
            self.written = min(size - len(self._header), self.nbytes)
        else:
            os.ftruncate(self._file, 0)
            self._write(self._header)
        self.rewind(self.written)

    def _lock(self) -> None:
        """Lock the part file: processes of one machine share a cache, and two writers would corrupt the file."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(self._file).st_ino == self._part.stat().st_ino
        except (BlockingIOError, FileNotFoundError):
            mine = False  # another process holds the lock, or has just finished the file
        if not mine:
            raise BusyFileError(
                f"{self.path}: another process is writing this file. Wait until it ends."
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def write(self, data: Buffer) -> None:
        """Append tensor bytes."""
        try:
            self._write(data)
        except OSError as error:
            raise self._error(error) from error
        self.written += len(data)

    def _write(self, data: Buffer) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def read(self, start: int, length: int) -> bytes:
        """Return up to `length` of the tensor bytes written so far, from `start`."""
        end = min(start + length, self.written)
        return os.pread(self._file, max(0, end - start), len(self._header) + start)

    def rewind(self, written: int) -> None:
        """Discard all tensor bytes after the first `written`."""
        os.ftruncate(self._file, len(self._header) + written)
        os.lseek(self._file, 0, os.SEEK_END)
        self.written = written

    def discard(self) -> None:
        """Remove the part file, when another writer has finished the file in the meantime."""
        self._part.unlink(missing_ok=True)

    def sync(self) -> None:
        """Flush the file, and return when all written bytes are on the disk."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._error(error) from error

    def finish(self) -> None:
        """Flush the file and rename it to `path`."""
        assert self.written == self.nbytes, f"{self.path}: {self.written} of {self.nbytes} bytes"
        self.sync()
        try:
            self._part.replace(self.path)
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> CheckpointError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            rest = format_size(self.nbytes - self.written)
            return CheckpointError(
                f"{self.path.parent}: the disk is full, and {self.path.name} needs {rest} more. Free some space and "
                "repeat the command: it resumes here.",
                public="a disk is full",
            )
        return CheckpointError(f"{self._part}: cannot be written: {error.strerror or error}")


def replace_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8 with `replace_bytes`."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace the content of a small file atomically, even when several processes write it.

    Raises CheckpointError when the file cannot be written.
    """
    try:
        file, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
        part = Path(name)
        try:
            with open(file, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            part.chmod(0o644)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
