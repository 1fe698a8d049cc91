"""The rows of hashed n-grams, and the table on disk that has them.

The hash is that of transformers' `Qwen4ExpTextNGramEmbedding`. The table has tens of gigabytes and is never read as a
whole: the file is mapped, and a token reads some rows of it.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mtp.flash_next.args import NgramArgs
from mtp.sampling.choice import splitmix64

Ints = npt.NDArray[np.int64]

_GAMMA = 0x9E3779B97F4A7C15

ROW_TYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "U32": np.uint32}
"""The types of rows by their names in safetensors. numpy has no bfloat16."""


def _primes_from(start: int, count: int) -> list[int]:
    """Return the first `count` primes that are at least `start`."""
    found: list[int] = []
    value = start
    while len(found) < count:
        odd = range(3, math.isqrt(value) + 1, 2)
        if value == 2 or (value > 2 and value % 2 and all(value % d for d in odd)):
            found.append(value)
        value += 1
    return found


class NgramHash:
    """The rows of the n-grams at each token, for the PLE number `place` of a model."""

    def __init__(self, args: NgramArgs, place: int) -> None:
        self.args = args
        heads = args.all_heads
        primes = _primes_from(args.base, (place + 1) * heads)[place * heads :]
        self._sizes = np.array(primes, np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(self._sizes)[:-1]])
        self.rows = math.ceil(int(self._sizes.sum()) / args.divisor) * args.divisor
        """Rows of the table, those that pad it included."""
        half = max(1, ((1 << 63) - 1) // args.vocab // 2)
        seed = args.seed + 10007 * place
        self._factors = [
            2 * (splitmix64(seed + _GAMMA * (i + 1)) % half) + 1 for i in range(args.size)
        ]

    @property
    def context(self) -> int:
        """Tokens before the first one that its n-grams have."""
        return self.args.size - 1

    def row_ids(self, tokens: Ints) -> Ints:
        """Return the rows `[n, heads]` of the last n of `tokens`, which begin with `context` earlier ones.

        Tokens before an end of text count as the end of text.
        """
        count = len(tokens) - self.context
        eos, open_text = self.args.eos, np.ones(count, bool)
        mixed = tokens[self.context :] * self._factors[0]
        blocks: list[Ints] = []
        for back in range(1, self.args.size):
            before = tokens[self.context - back : len(tokens) - back]
            open_text = open_text & (before != eos)
            mixed = mixed ^ (np.where(open_text, before, eos) * self._factors[back])
            own = slice((back - 1) * self.args.heads, back * self.args.heads)
            blocks.append(mixed[:, None] % self._sizes[own] + self._offsets[own])
        return np.concatenate(blocks, axis=1)


@dataclass(frozen=True)
class TablePart:
    """A tensor `[rows, columns]` in a file: the type's name in safetensors, and the first byte."""

    file: Path
    dtype: str
    start: int
    shape: tuple[int, ...]


class _Mapped:
    """Parts of a table, one below another, mapped into memory."""

    def __init__(self, parts: Sequence[TablePart]) -> None:
        self.columns = parts[0].shape[1]
        self.dtype = parts[0].dtype
        self.ends = np.cumsum([part.shape[0] for part in parts])
        self._kind = np.dtype(ROW_TYPES[self.dtype])
        self._parts = [(_map_file(part.file, part.file.stat()), part.start) for part in parts]

    def read(self, ids: Ints) -> npt.NDArray[np.generic]:
        """Return the rows of `ids`, which are sorted. The disk reads all of them at once."""
        size = self.columns * self._kind.itemsize
        found = np.empty((len(ids), self.columns), self._kind)
        borders = np.searchsorted(ids, [0, *self.ends])
        for part, (mapped, start) in enumerate(self._parts):
            own = slice(borders[part], borders[part + 1])
            if own.start == own.stop:
                continue
            first = 0 if part == 0 else int(self.ends[part - 1])
            places = ids[own] - first
            pages = (start + places * size) // mmap.PAGESIZE
            for page in np.unique([pages, (start + (places + 1) * size - 1) // mmap.PAGESIZE]):
                mapped.madvise(mmap.MADV_WILLNEED, int(page) * mmap.PAGESIZE, mmap.PAGESIZE)
            shape = int(self.ends[part]) - first, self.columns
            found[own] = np.ndarray(shape, self._kind, buffer=mapped, offset=start)[places]
        return found


_mapped: WeakValueDictionary[tuple[int, ...], mmap.mmap] = WeakValueDictionary()
"""The mappings in use, by device, inode, size and time: another file may come to the same path."""


def _map_file(file: Path, found: os.stat_result) -> mmap.mmap:
    """Return the mapping of a file, of which several tensors may be parts."""
    key = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    if (known := _mapped.get(key)) is not None:
        return known
    with file.open("rb") as opened:
        mapped = _mapped[key] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    return mapped


class NgramTable:
    """The rows of a PLE, plain or quantized by MLX in groups along a row."""

    def __init__(
        self,
        weight: Sequence[TablePart],
        scales: Sequence[TablePart] = (),
        biases: Sequence[TablePart] = (),
    ) -> None:
        self._parts = [_Mapped(parts) for parts in (weight, scales, biases) if parts]

    def read(self, ids: Ints, dim: int, dtype: mx.Dtype) -> mx.array:
        """Return the rows `[len(ids), dim]` of `ids`, each of which is read once."""
        wanted, places = np.unique(ids, return_inverse=True)
        places = places.reshape(-1)
        arrays = []
        for part in self._parts:
            found = mx.array(part.read(wanted)[places])
            arrays.append(found.view(mx.bfloat16) if part.dtype == "BF16" else found)
        rows = arrays[0]
        if len(arrays) > 1:
            bits = 32 * arrays[0].shape[1] // dim
            weight, scales, biases = (*arrays, None)[:3]
            assert weight is not None and scales is not None, "there are two parts or three"
            group = dim // scales.shape[1]
            rows = mx.dequantize(weight, scales, biases, group_size=group, bits=bits)
        return rows.astype(dtype)
