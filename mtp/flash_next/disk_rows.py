"""The rows of n-grams in a checkpoint: their tensors, which stay on disk, their checks, and their conversion."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mtp.flash_next.args import NgramArgs
from mtp.flash_next.ngrams import ROW_TYPES, NgramHash, NgramTable
from proto.errors import CheckpointError

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
