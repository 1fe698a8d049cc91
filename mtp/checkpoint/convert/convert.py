"""A raw checkpoint becomes an MLX one with its MTP head, one module at a time.

What is written first says what is being written (`conversion.json`), what is written last makes it a checkpoint
(`config.json`); between them come whole files only. So a conversion that was cut off goes on where it was, and
nobody takes half of one for a model.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp.checkpoint.convert.converted_weights import Converted, convert_weights
from mtp.checkpoint.convert.output import (
    HEAD_FILE,
    SHARD_BYTES,
    check_room,
    copy_beside,
    cut_shards,
    save_config,
    shard_names,
    write_index,
    write_shard,
    writer_of,
)
from mtp.checkpoint.convert.settings import Settings
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.shard import replace_text
from proto.errors import CheckpointError, UsageError
from proto.progress import OnProgress

JOURNAL = "conversion.json"


@dataclass(frozen=True)
class Outcome:
    """What a conversion did. `resumed` counts the bytes an earlier, interrupted one had written."""

    path: Path
    nbytes: int
    resumed: int
    has_head: bool
    dtypes: tuple[str, ...]


def convert(
    source: Checkpoint,
    path: Path,
    settings: Settings,
    on_progress: OnProgress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> Outcome:
    """Write `source` into the directory `path` as `settings` ask.

    Peak memory is that of the largest module, with the tensors it is made of. Raises UsageError when `path` holds
    something else, CheckpointError for a source that cannot be converted or a disk that cannot take it.
    """
    if source.mtp.present and not source.mtp.complete:
        raise CheckpointError(
            f"{source.path}: its MTP head lacks {source.mtp.missing[0]}; download the checkpoint again"
        )
    weights = convert_weights(source, settings)
    _open(path, {"source": source.fingerprint(), "settings": asdict(settings)})
    resumed, nbytes, dtypes = _write(path, weights, on_progress, shard_bytes)
    copy_beside(source.path, path)
    save_config(path, _config(source, weights))
    (path / JOURNAL).unlink()
    return Outcome(path, nbytes, resumed, source.mtp.complete, dtypes)


def _open(path: Path, journal: dict[str, Any]) -> None:
    """Begin in a new or empty directory, or go on in one that the same conversion has begun."""
    text = json.dumps(journal, indent=2)
    found = path / JOURNAL
    if found.is_file():
        if found.read_text(encoding="utf-8") != text:
            raise UsageError(
                f"{path}: an unfinished conversion of another checkpoint, or with other flags, lies there; repeat "
                "that one, or remove the directory"
            )
        return
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path}: exists already; name a new directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be made: {error.strerror or error}") from error
    replace_text(found, text)


def _write(
    path: Path, weights: Converted, on_progress: OnProgress, shard_bytes: int
) -> tuple[int, int, tuple[str, ...]]:
    """Write the files that are not there yet, and the index. Returns bytes that were there, bytes in all, and types."""
    shards = cut_shards(weights.backbone, shard_bytes)
    files = dict(zip(shard_names(len(shards)), shards, strict=True))
    if weights.head:
        files[HEAD_FILE] = weights.head
    writers = {name: writer_of(path / name, groups) for name, groups in files.items()}
    dtypes = {entry.dtype for writer in writers.values() for entry in writer.entries}
    total = sum(writer.nbytes for writer in writers.values())
    finished = {name for name, writer in writers.items() if writer.is_finished()}
    resumed = done = sum(writers[name].nbytes for name in finished)
    check_room(path, total - done)

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    on_progress(done, total)
    weights.backbone, weights.head = [], []  # what is written is not to be kept
    for name, groups in files.items():
        if name not in finished:
            write_shard(writers[name], groups, on_bytes)
    write_index(path, writers)
    return resumed, total, tuple(sorted(dtypes))


def _config(source: Checkpoint, weights: Converted) -> dict[str, Any]:
    """The source's config.json, without the part for images, and true about the head and the quantization."""
    config: dict[str, Any] = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    for key in ("_name_or_path", "vision_config", "quantization_config"):
        config.pop(key, None)
    text = config.get("text_config", config)
    text["mtp_num_hidden_layers"] = int(source.mtp.complete)
    if weights.quantization is not None:
        config["quantization"] = config["quantization_config"] = weights.quantization
    return config
