"""The output directory of a conversion: its shards, its index, and the small files of the source."""

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
from mtp.checkpoint.format.config import QUANTIZATION_FILE
from mtp.checkpoint.format.shard import ShardWriter, replace_bytes, replace_text
from proto.errors import CheckpointError
from proto.terminal.progress import format_size

SHARD_BYTES = 2 * 1024**3
"""Bytes. Approximate size of a shard, and the most that an interrupted conversion does again."""

HEAD_FILE = "mtp.safetensors"
"""The file of the MTP head. mlx-lm reads `model*.safetensors` only.

In these files, mlx-lm up to 0.31.3 treats an `mtp.` tensor as a sign of raw norms. It would shift the norms of the
backbone a second time, and the output would be wrong.
"""

_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model")
_NOT_BESIDE = (
    "config.json",
    QUANTIZATION_FILE,
    "quantize_config.json",
    "quantization_config.json",
    INDEX,
    "*preprocessor_config.json",
)
"""The files that are copied: those of the tokenizer, not those that describe weights or images."""


def cut_shards(groups: Sequence[Group], limit: int) -> list[list[Group]]:
    """Split `groups` into shards of about `limit` bytes; a group is never split."""
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
    """Return the names of `count` shards, as mlx-lm and transformers name them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def shard_writer(path: Path, groups: Sequence[Group]) -> ShardWriter:
    """Return the writer of a file with the tensors of `groups`."""
    return ShardWriter(path, [entry for group in groups for entry in group.entries])


def write_shard(
    writer: ShardWriter, groups: list[Group], on_group: Callable[[Group], None]
) -> None:
    """Compute, write and release group after group; `groups` is empty afterwards.

    `on_group` receives each group after it was written.
    """

    def write_all() -> None:
        """Write all groups. The bytes of an earlier run have no hash, so they are written again."""
        writer.rewind(0)
        groups.reverse()
        while groups:
            group = groups.pop()
            _write_group(writer, group)
            on_group(group)
            del group
            mx.clear_cache()

    writer.complete(write_all)


def _write_group(writer: ShardWriter, group: Group) -> None:
    """Compute and write one group."""
    mx.eval(group.arrays)
    for array in group.arrays:
        flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
        writer.write(np.array(flat, copy=False).data)


def check_free_space(path: Path, needed: int) -> None:
    """Raise CheckpointError unless the disk under `path` has `needed` bytes left."""
    free = shutil.disk_usage(path).free
    if needed > free:
        raise CheckpointError(
            f"{path}: {format_size(needed)} are needed, and the disk has {format_size(free)} left. Free some space.",
            public="a disk is full",
        )


def write_index(path: Path, shards: dict[str, ShardWriter]) -> None:
    """Write the index that maps each tensor to its file."""
    weight_map = {entry.name: file for file, writer in shards.items() for entry in writer.entries}
    total = sum(writer.nbytes for writer in shards.values())
    save_index(path, {"total_size": total}, weight_map)


def save_index(path: Path, metadata: dict[str, Any], weight_map: dict[str, str]) -> None:
    """Write the index `weight_map`, from tensor name to file name, into the directory `path`."""
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    replace_text(path / INDEX, json.dumps(index, indent=2))


def save_config(path: Path, config: dict[str, Any]) -> None:
    """Write config.json with sorted keys, as mlx-lm writes it."""
    replace_text(path / "config.json", json.dumps(dict(sorted(config.items())), indent=2))


def copy_beside(source: Path, path: Path) -> None:
    """Copy the tokenizer and the other small files of a checkpoint."""
    for pattern in _BESIDE:
        for file in source.glob(pattern):
            if not any(file.match(name) for name in _NOT_BESIDE):
                replace_bytes(path / file.name, file.read_bytes())
