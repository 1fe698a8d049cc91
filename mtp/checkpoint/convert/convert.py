"""The conversion of a raw checkpoint to an MLX one that keeps its MTP head, one module at a time.

`conversion.json` is written first and names the source and the settings. `config.json` is written last and makes the
directory a checkpoint. All files between them appear complete. So an interrupted conversion resumes after its last
complete file, and no program loads an unfinished one.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mtp.checkpoint.convert.converted_weights import (
    ConvertedWeights,
    Group,
    Settings,
    convert_weights,
)
from mtp.checkpoint.format.checkpoint import INDEX, Checkpoint
from mtp.checkpoint.format.config import QUANTIZATION_FILE
from mtp.checkpoint.format.shard import ShardWriter, replace_bytes, replace_text
from proto.errors import CheckpointError, UsageError
from proto.terminal.progress import OnProgress, format_size

SHARD_BYTES = 2 * 1024**3
"""Bytes. Approximate size of a shard, and the most that an interrupted conversion does again."""

HEAD_FILE = "mtp.safetensors"
"""The file of the MTP head. mlx-lm reads `model*.safetensors` only. There an `mtp.` tensor would make mlx-lm up to
0.31.3 shift the norms of the backbone a second time, and the output would be wrong."""

_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model")
_NOT_BESIDE = (
    "config.json",
    QUANTIZATION_FILE,
    "quantize_config.json",
    "quantization_config.json",
    INDEX,
    "*preprocessor_config.json",
)
"""The files that are copied: those of the tokenizer, not those that describe weights. PROCESSOR follows the tower."""


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


def shard_writer(path: Path, groups: Sequence[Group]) -> ShardWriter:
    """Return the writer of a file with the tensors of `groups`."""
    return ShardWriter(path, [entry for group in groups for entry in group.entries])


def write_shard(
    writer: ShardWriter, groups: list[Group], on_group: Callable[[Group], None]
) -> None:
    """Compute, write and release group after group, and call `on_group` after each. `groups` is empty then."""

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
    """Compute and write one group. No name refers to its arrays afterwards."""
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


def save_index(path: Path, nbytes: int, weight_map: dict[str, str]) -> None:
    """Write the index of `nbytes` of tensors, from tensor name to file name, into the directory `path`."""
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    replace_text(path / INDEX, json.dumps(index, indent=2))


def save_config(path: Path, config: dict[str, Any]) -> None:
    """Write config.json with sorted keys, as mlx-lm writes it."""
    replace_text(path / "config.json", json.dumps(dict(sorted(config.items())), indent=2))


VISION_FILE, PROCESSOR = "model-vision.safetensors", "preprocessor_config.json"
"""The file of the vision part, by a name that mlx-lm and mlx-vlm read, and that of the image processor."""

JOURNAL = "conversion.json"
"""The file that describes an unfinished conversion."""


@dataclass(frozen=True)
class ConversionResult:
    """The result of a conversion. `resumed` counts bytes of an earlier run, `ways` the packed weights of this one."""

    path: Path
    nbytes: int
    resumed: int
    has_head: bool
    dtypes: tuple[str, ...]
    ways: Counter[str]


def convert(
    source: Checkpoint,
    path: Path,
    settings: Settings,
    on_progress: OnProgress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> ConversionResult:
    """Convert `source` into the directory `path`. The peak memory is that of the largest module and its tensors.

    Raises UsageError when `path` holds something else, and CheckpointError for the source or a full disk.
    """
    if source.mtp.present and not source.mtp.complete:
        raise CheckpointError(
            f"{source.path}: tensor {source.mtp.missing[0]} of the MTP head is missing. Download the checkpoint again."
        )
    weights = convert_weights(source, settings)
    has_vision = bool(weights.vision)  # the groups are released as they are written
    _open(path, {"source": source.fingerprint(), "settings": asdict(settings)})
    ways: Counter[str] = Counter()
    resumed, nbytes, dtypes = _write(path, weights, on_progress, shard_bytes, ways)
    for file in (file for pattern in _BESIDE for file in source.path.glob(pattern)):
        if not any(file.match(name) for name in _NOT_BESIDE):
            replace_bytes(path / file.name, file.read_bytes())
    processor = source.path / PROCESSOR
    if has_vision and processor.is_file():
        replace_bytes(path / PROCESSOR, processor.read_bytes())
    save_config(path, _config(source, weights, has_vision))
    (path / JOURNAL).unlink()
    return ConversionResult(path, nbytes, resumed, source.mtp.complete, dtypes, ways)


def _open(path: Path, journal: dict[str, Any]) -> None:
    """Start in a new or empty directory, or resume in the directory of the same conversion."""
    text = json.dumps(journal, indent=2)
    found = path / JOURNAL
    if found.is_file():
        if found.read_text(encoding="utf-8") != text:
            raise UsageError(
                f"{path}: holds an unfinished conversion of another checkpoint or with other flags. Repeat that "
                "conversion, or remove the directory."
            )
        return
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path}: exists already. Give a new directory.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be created: {error.strerror or error}") from error
    replace_text(found, text)


def _write(
    path: Path,
    weights: ConvertedWeights,
    on_progress: OnProgress,
    shard_bytes: int,
    ways: Counter[str],
) -> tuple[int, int, tuple[str, ...]]:
    """Write the missing files and the index, and count `ways`. Return the resumed bytes, all bytes and the types."""
    shards = cut_shards(weights.backbone, shard_bytes)
    # The names are those of mlx-lm and transformers.
    suffix = f"of-{len(shards):05}.safetensors"
    files = {f"model-{number:05}-{suffix}": shard for number, shard in enumerate(shards, 1)}
    if len(shards) == 1:
        files = {"model.safetensors": shards[0]}
    if weights.head:
        files[HEAD_FILE] = weights.head
    if weights.vision:
        files[VISION_FILE] = weights.vision
    writers = {name: shard_writer(path / name, groups) for name, groups in files.items()}
    dtypes = {entry.dtype for writer in writers.values() for entry in writer.entries}
    total = sum(writer.nbytes for writer in writers.values())
    finished = {name for name, writer in writers.items() if writer.is_finished()}
    resumed = done = sum(writers[name].nbytes for name in finished)
    check_free_space(path, total - done)

    def on_group(group: Group) -> None:
        nonlocal done
        done += group.nbytes
        ways.update([group.way] if group.way else [])
        on_progress(done, total)

    on_progress(done, total)
    # Each group is released after it is written.
    weights.backbone, weights.head, weights.vision = [], [], []
    for name, groups in files.items():
        if name not in finished:
            write_shard(writers[name], groups, on_group)
    weight_map = {entry.name: file for file, writer in writers.items() for entry in writer.entries}
    save_index(path, total, weight_map)
    return resumed, total, tuple(sorted(dtypes))


def _config(source: Checkpoint, weights: ConvertedWeights, has_vision: bool) -> dict[str, Any]:
    """Return the source's config.json, updated for the head, the quantization and a vision part that is left out."""
    config: dict[str, Any] = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    if not has_vision:
        config.pop("vision_config", None)
    for key in ("_name_or_path", "quantization_config", "compression_config"):
        config.pop(key, None)
    text = config.get("text_config", config)
    for key in ("quantization_config", "compression_config"):
        text.pop(key, None)
    text["mtp_num_hidden_layers"] = int(source.mtp.complete)
    # mlx-lm does not read the places that older exporters used.
    text["rope_parameters"] = source.config.text_config["rope_parameters"]
    source.config.family.convert_text(text)
    if weights.quantization is not None:
        config["quantization"] = config["quantization_config"] = weights.quantization
    return config
