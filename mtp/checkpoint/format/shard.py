"""A safetensors file written tensor by tensor, so that no more than one of them need be in memory.

It grows under `NAME.part` and gets its name when it is whole and on the disk: what bears the name can be trusted, what
does not is never read as a checkpoint. Names, dtypes and shapes are known before the first byte, so the header comes
first and a broken-off file says by its length how far it got.
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
"""The format's own: the first tensor starts at a multiple of it."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file to be written; `dtype` as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return STORED_BYTES[self.dtype] * math.prod(self.shape)


def encode_header(entries: Sequence[Entry], form: str) -> bytes:
    """The length and JSON header of a file that holds `entries` one after another; `form` is `pt` or `mlx`."""
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
    """A file that another process is writing."""


class ShardWriter:
    """Writes `path`; a context manager, which leaves the part file behind unless `finish` was called.

    `written` counts bytes of tensors, the header not among them. Every error of the file system is a CheckpointError
    that says what to do.
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
        """Whether `path` is there, with just these tensors, and not damaged as far as its size tells."""
        try:
            return self.path.is_file() and read_header(self.path).tensors == self.tensors()
        except CheckpointError:
            return False

    def missing_bytes(self) -> int:
        """About how much is still to be written, by the part file there is."""
        try:
            there = self._part.stat().st_size - len(self._header)
        except FileNotFoundError:  # or it has been finished this moment
            there = 0
        return self.nbytes - max(0, min(there, self.nbytes))

    def tensors(self) -> dict[str, TensorInfo]:
        """Where each tensor lies once the file is finished."""
        found: dict[str, TensorInfo] = {}
        start = len(self._header)
        for entry in self.entries:
            found[entry.name] = TensorInfo(self.path, entry.dtype, entry.shape, start, entry.nbytes)
            start += entry.nbytes
        return found

    def __enter__(self) -> ShardWriter:
        """Open the part file. One with the same header is gone on with: `written` says where.

        Raises BusyFileError while another writer has it.
        """
        try:
            self._file = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._begin()
            except BaseException:
                os.close(self._file)  # and with it the lock, for which later calls would wait
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
        """Two writers of one file would spoil it: processes of one machine share a cache."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(self._file).st_ino == self._part.stat().st_ino
        except (BlockingIOError, FileNotFoundError):
            mine = False  # or another has it, or had, and it has its name meanwhile
        if not mine:
            raise BusyFileError(f"{self.path}: another process is writing it; wait for its end")

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
        """Up to `length` tensor bytes written so far, from `start`."""
        end = min(start + length, self.written)
        return os.pread(self._file, max(0, end - start), len(self._header) + start)

    def rewind(self, written: int) -> None:
        """Forget all tensor bytes after the first `written`."""
        os.ftruncate(self._file, len(self._header) + written)
        os.lseek(self._file, 0, os.SEEK_END)
        self.written = written

    def discard(self) -> None:
        """Leave no part file behind: another writer has finished the file since it was looked for."""
        self._part.unlink(missing_ok=True)

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._error(error) from error

    def finish(self) -> None:
        """Give the file its name, once its bytes are on the disk."""
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
                f"{self.path.parent}: the disk is full, and {self.path.name} needs {rest} more; make room and "
                "do the same again: it goes on from here",
                public="a disk is full",
            )
        return CheckpointError(f"{self._part}: cannot be written: {error.strerror or error}")


def replace_text(path: Path, text: str) -> None:
    """As `replace_bytes`, in UTF-8."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a small file so that it has its old content or the new, and nothing between, whoever else writes it.

    Raises CheckpointError when it cannot be written.
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
