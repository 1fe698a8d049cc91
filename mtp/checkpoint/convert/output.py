"""The directory a converted checkpoint is written into: its shards, its index, and what lies beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mtp.checkpoint.convert.converted_weights import Group
from mtp.checkpoint.format.checkpoint import INDEX
from mtp.checkpoint.format.shard import ShardWriter, replace_bytes, replace_text
from proto.errors import CheckpointError
from proto.terminal.size import format_size

SHARD_BYTES = 2 * 1024**3
"""Of a finished file, about: as much as an interrupted conversion may have to do again."""

HEAD_FILE = "mtp.safetensors"
"""The head's own file. mlx-lm reads `model*.safetensors`, and its releases up to 0.31.3 take an `mtp.` tensor in
there for a sign that norms are raw: they would shift the backbone's a second time, and write nonsense.
"""

_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model")
_NOT_BESIDE = ("config.json", INDEX, "*preprocessor_config.json")
"""What a tokenizer is made of is copied; what describes weights is written anew, and images are not read."""


def cut_shards(groups: Sequence[Group], limit: int) -> list[list[Group]]:
    """Files of about `limit` bytes, each a run of whole groups."""
    shards: list[list[Group]] = []
    size = limit
    for group in groups:
        if size + group.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += group.nbytes
    return shards


def shard_names(count: int) -> list[str]:
    """As mlx-lm and transformers name them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def writer_of(path: Path, groups: Sequence[Group]) -> ShardWriter:
    return ShardWriter(path, [entry for group in groups for entry in group.entries])


def write_shard(writer: ShardWriter, groups: list[Group], on_bytes: Callable[[int], None]) -> None:
    """Make and write group after group, and let each go; `groups` is empty afterwards."""
    with writer:
        writer.rewind(0)
        groups.reverse()
        while groups:
            on_bytes(_write_group(writer, groups.pop()))
            mx.clear_cache()
        writer.finish()


def _write_group(writer: ShardWriter, group: Group) -> int:
    """Returns its bytes. When it does, nothing refers to the group's arrays any more."""
    mx.eval(group.arrays)
    for array in group.arrays:
        flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
        writer.write(np.array(flat, copy=False).data)
    return group.nbytes


def check_room(path: Path, needed: int) -> None:
    """Raise CheckpointError unless the disk under `path` has `needed` bytes left."""
    free = shutil.disk_usage(path).free
    if needed > free:
        raise CheckpointError(
            f"{path}: {format_size(needed)} are to be written, and the disk has {format_size(free)} left",
            public="a disk is full",
        )


def write_index(path: Path, shards: dict[str, ShardWriter]) -> None:
    """Which tensor lies in which file."""
    weight_map = {entry.name: file for file, writer in shards.items() for entry in writer.entries}
    total = sum(writer.nbytes for writer in shards.values())
    save_index(path, {"total_size": total}, weight_map)


def save_index(path: Path, metadata: dict[str, Any], weight_map: dict[str, str]) -> None:
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    replace_text(path / INDEX, json.dumps(index, indent=2))


def save_config(path: Path, config: dict[str, Any]) -> None:
    """With its keys sorted, as mlx-lm writes it."""
    replace_text(path / "config.json", json.dumps(dict(sorted(config.items())), indent=2))


def copy_beside(source: Path, path: Path) -> None:
    """Copy the tokenizer and the other small files of a checkpoint."""
    for pattern in _BESIDE:
        for file in source.glob(pattern):
            if not any(file.match(name) for name in _NOT_BESIDE):
                replace_bytes(path / file.name, file.read_bytes())
