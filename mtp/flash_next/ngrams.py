"""The rows of hashed n-grams, and the table on disk that has them.

The hash is that of transformers' `Qwen4ExpTextNGramEmbedding`. The table has tens of gigabytes: the file is mapped, and
a token reads some rows of it.
"""

from __future__ import annotations

import itertools
import math
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mtp.flash_next.args import NgramArgs
from mtp.sampling.sampler import splitmix64
from proto.errors import CheckpointError

Ints = npt.NDArray[np.int64]

Rows = np.memmap[Any, Any]
"""Rows `[rows, columns]` of a table in a file that is mapped into memory, in a type of ROW_TYPES."""

_GAMMA = 0x9E3779B97F4A7C15

ROW_TYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "U32": np.uint32}
"""The types of rows by their names in safetensors. numpy has no bfloat16."""


@lru_cache
def _primes_from(start: int, count: int) -> list[int]:
    """Return the first `count` primes that are at least `start`."""
    numbers = itertools.count(max(2, start))
    primes = (n for n in numbers if all(n % d for d in range(2, math.isqrt(n) + 1)))
    return list(islice(primes, count))


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
        self._factors = [2 * (splitmix64(seed + _GAMMA * (i + 1)) % half) + 1 for i in range(args.size)]

    @property
    def stored_values(self) -> dict[str, list[int]]:
        """The numbers of the hash by the names of the tensors that transformers stores beside the table."""
        return {
            "layer_multipliers": self._factors,
            "ngram_heads_vocab_sizes": self._sizes.tolist(),
            "ngram_heads_offsets": self._offsets.tolist(),
        }

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


class Mapped:
    """Parts of a table, one below another, mapped into memory."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(rows) for rows in parts])

    def advise(self, ids: Ints) -> None:
        """Let the disk read the rows of `ids`, which are sorted, all at once and without waiting for them."""
        for _, rows, at in self._located(ids):
            mapped: Any = rows.base
            begins = rows.offset % mmap.ALLOCATIONGRANULARITY + at * rows.strides[0]
            bounds = np.stack([begins, begins + rows.strides[0] - 1])
            with suppress(OSError):  # a disk that takes no advice reads row by row
                for page in np.unique(bounds // mmap.PAGESIZE).tolist():
                    mapped.madvise(mmap.MADV_WILLNEED, page * mmap.PAGESIZE, mmap.PAGESIZE)

    def read(self, ids: Ints) -> npt.NDArray[np.generic]:
        """Return the rows of `ids`, which are sorted."""
        found = np.empty((len(ids), self._parts[0].shape[1]), self._parts[0].dtype)
        for own, rows, at in self._located(ids):
            found[own] = rows[at]
        return found

    def _located(self, ids: Ints) -> Iterator[tuple[slice, Rows, Ints]]:
        """Yield which of `ids` lie in a part, the part, and their rows in it."""
        borders = np.searchsorted(ids, [0, *self._ends])
        for rows, end, own in zip(self._parts, self._ends, pairwise(borders), strict=True):
            if own[0] < own[1]:
                yield slice(*own), rows, ids[slice(*own)] - (end - len(rows))


class NgramTable:
    """The rows of a PLE, plain or quantized by MLX in groups along a row."""

    def __init__(
        self,
        weight: Sequence[Rows],
        scales: Sequence[Rows] = (),
        biases: Sequence[Rows] = (),
        *,
        factor: float = 1.0,
    ) -> None:
        """Read rows of these parts, times `factor`."""
        self._factor = factor
        self._parts = [Mapped(parts) for parts in (weight, scales, biases) if parts]
        self._advised = np.empty(0, np.int64)

    def prefetch(self, ids: Ints) -> None:
        """Let the disk read the rows of `ids`, without waiting for them."""
        self._advised = np.unique(ids)
        for part in self._parts:
            part.advise(self._advised)

    def read(self, ids: Ints, dim: int, dtype: mx.Dtype) -> mx.array:
        """Return the rows `[len(ids), dim]` of `ids`, each of which is read once."""
        wanted, places = np.unique(ids, return_inverse=True)
        missing = np.setdiff1d(wanted, self._advised, assume_unique=True)
        for part in self._parts:
            part.advise(missing)
        self._advised = np.setdiff1d(self._advised, wanted, assume_unique=True)
        arrays = []
        for part in self._parts:
            found = mx.array(part.read(wanted)[places])
            arrays.append(found.view(mx.bfloat16) if found.dtype == mx.uint16 else found)
        rows, *factors = arrays
        if factors:
            group, bits = dim // factors[0].shape[1], 32 * rows.shape[1] // dim
            biases = factors[1] if factors[1:] else None
            rows = mx.dequantize(rows, factors[0], biases, group_size=group, bits=bits)
        return (rows if self._factor == 1 else rows * self._factor).astype(dtype)


_TENSOR = re.compile(r"ple\.ple_embedding\.ngram_embedding\.(?:shards?[._](\d+)\.)?(weight|scales|biases|weight_scale)")
_BASE = "ple.ple_embedding.ngram_embedding"

_GROUP = 32
"""Weights of a scale in quantized rows: 160 are no multiple of 64."""


def is_row(name: str) -> bool:
    """Return whether a tensor of a layer is a part of its table."""
    return _TENSOR.fullmatch(name) is not None


def table_names(checkpoint: Any, part: str) -> dict[str, list[str]]:
    """Return the stored names of the table of `part`, in their order by kind, such as `weight`."""
    found: dict[str, dict[int, str]] = {}
    for name, stored in checkpoint.on_disk.get(part, {}).items():
        if match := _TENSOR.fullmatch(name):
            found.setdefault(match[2], {})[int(match[1] or 0)] = stored
    return {kind: [name for _, name in sorted(names.items())] for kind, names in found.items()}


def check_rows(checkpoint: Any, part: str) -> None:
    """Raise CheckpointError for rows in a type that neither a stage nor the conversion reads."""
    kinds = table_names(checkpoint, part)
    wanted = [*ROW_TYPES, *(["F8_E4M3"] if "weight_scale" in kinds else [])]
    for name in (name for names in kinds.values() for name in names):
        info = checkpoint.tensors[name]
        if info.dtype not in wanted:
            raise CheckpointError(
                f"{info.file}: rows of n-grams are stored as {info.dtype}; {' or '.join(wanted)} is needed. Use "
                "the checkpoint in BF16, or one that mtp-coord convert made."
            )


def check_derived(checkpoint: Any, part: str) -> None:
    """Raise CheckpointError for a stored tensor that has other values than config.json gives it."""
    config = checkpoint.config
    for name in checkpoint.ignored:
        local = f"{part}.{name.rpartition(f'{part}.')[2]}"
        wanted = config.family.derived_values(config.text_config, local) if f"{part}." in name else None
        if wanted is None:
            continue
        info = checkpoint.tensors[name]
        checkpoint.check_file(info.file)
        kind = np.dtype({"I64": "<i8", "I32": "<i4"}.get(info.dtype, "V1"))
        held = np.fromfile(info.file, kind, math.prod(info.shape), offset=info.start).tolist()
        if held != wanted:
            raise CheckpointError(
                f"{info.file}: tensor {name} has {held!s:.60}, and config.json gives {wanted!s:.60}. The n-grams "
                "of this checkpoint are hashed in another way, which is not supported."
            )


def open_table(checkpoint: Any, part: str, rows: int) -> NgramTable:
    """Map the table of `part`. Raises CheckpointError unless it has `rows` rows."""
    kinds = table_names(checkpoint, part)
    if not kinds:
        raise CheckpointError(
            f"{checkpoint.path}: the rows of n-grams of {part} are missing (ple_embedding). Download them."
        )
    check_rows(checkpoint, part)
    check_derived(checkpoint, part)
    # Beside rows of MLX, which others have converted from FP8, stands the factor of all values.
    factors = [checkpoint.load_tensor(name) for name in kinds.pop("weight_scale", [])]
    factor = float(np.array(factors[0].astype(mx.float32))[0]) if factors else 1.0
    tables = {kind: [checkpoint.tensors[name] for name in names] for kind, names in kinds.items()}
    for info in (piece for pieces in tables.values() for piece in pieces):
        checkpoint.check_file(info.file)
    found = {kind: sum(piece.shape[0] for piece in pieces) for kind, pieces in tables.items()}
    if set(found.values()) != {rows} or "weight" not in found:
        raise CheckpointError(
            f"{checkpoint.path}: the table of {part}.ple has {found} rows, and config.json requires {rows} of its "
            "weight. Download the checkpoint again."
        )
    if unread := {i.dtype for pieces in tables.values() for i in pieces} - ROW_TYPES.keys():
        raise CheckpointError(
            f"{checkpoint.path}: the table of {part}.ple is stored as {min(unread)}, which is not served. Convert the "
            "checkpoint with mtp-coord convert."
        )
    mapped = {
        kind: [np.memmap(i.file, ROW_TYPES[i.dtype], "r", i.start, i.shape) for i in pieces]
        for kind, pieces in tables.items()
    }
    return NgramTable(factor=factor, **mapped)


def convert_rows(checkpoint: Any, cast: Callable[[mx.array], mx.array], bits: int | None) -> dict[str, mx.array]:
    """Return all rows by their names in MLX checkpoints, in groups of 32 if they are quantized."""
    found: dict[str, mx.array] = {}
    for part in checkpoint.on_disk:
        check_rows(checkpoint, part)
        kinds = table_names(checkpoint, part)
        for number, name in enumerate(kinds["weight"]):
            rows = checkpoint.load_tensor(name)
            if scale := kinds.get("weight_scale"):  # rows in FP8 with one scale for all
                factor = checkpoint.load_tensor(scale[0]).astype(mx.float32)
                rows = mx.from_fp8(rows.view(mx.uint8), mx.float32) * factor
                rows = rows.astype(mx.bfloat16)
            rows = cast(rows)
            base = f"model.{part}.{_BASE}.shards.{number}"
            if bits is None or rows.shape[1] % _GROUP:
                found[f"{base}.weight"] = rows
                continue
            packed = zip(("weight", "scales", "biases"), mx.quantize(rows, _GROUP, bits), strict=True)
            found |= {f"{base}.{kind}": array for kind, array in packed}
    return found


def row_sizes(ngrams: NgramArgs | None, bits: int | None) -> dict[str, tuple[str, tuple[int, int]]]:
    """Return the type and the shape of each table of a converted checkpoint, in one piece."""
    found: dict[str, tuple[str, tuple[int, int]]] = {}
    for place, layer in enumerate(ngrams.layers if ngrams else ()):
        assert ngrams is not None
        rows, dim = NgramHash(ngrams, place).rows, ngrams.row_dim
        kinds = {"weight": ("BF16", dim)}
        if bits is not None:
            scales = "BF16", dim // _GROUP
            kinds = {"weight": ("U32", dim * bits // 32), "scales": scales, "biases": scales}
        base = f"model.layers.{layer}.{_BASE}"
        found |= {f"{base}.{kind}": (dtype, (rows, columns)) for kind, (dtype, columns) in kinds.items()}
    return found
