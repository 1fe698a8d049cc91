"""Checkpoints whose files are replaced while a program that has read their headers runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.parts import read_part
from proto import cluster_pb2 as pb
from proto.errors import CheckpointError
from tests.support.checkpoints.checkpoints import write_checkpoint
from worker.node.node import LocalModels


def wanted(checkpoint: Checkpoint) -> pb.ModelRef:
    """Return how a coordinator names a checkpoint."""
    return pb.ModelRef(name="m", path=str(checkpoint.path), fingerprint=checkpoint.fingerprint())


def replace_weights(path: Path, layers: int, seed: int) -> None:
    """Replace the weights by those of another conversion, with the time of the old ones, as a copy with `-p` has."""
    file = path / "model.safetensors"
    before = file.stat()
    other = path.parent / "other"
    write_checkpoint(other, layers=layers, seed=seed)
    os.replace(other / "model.safetensors", file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_worker_serves_the_files_as_they_are_now(tmp_path: Path) -> None:
    """The old model is refused with the reason, and a coordinator that has opened the new one is served."""
    path = tmp_path / "model"
    write_checkpoint(path, layers=4, seed=1)
    models = LocalModels(path)
    old = wanted(Checkpoint.open(path))
    assert models.find(old).path == path
    assert models.open(path) is models.open(path), "nothing is read again while nothing changes"
    replace_weights(path, 4, seed=2)
    with pytest.raises(CheckpointError, match="has other content"):
        models.find(old)
    new = Checkpoint.open(path)
    assert models.find(wanted(new)).fingerprint() == new.fingerprint() != old.fingerprint


def test_no_tensor_is_read_at_the_offsets_of_another_file(tmp_path: Path) -> None:
    """A program that goes on with the old headers gets an error that names the file, and not other weights."""
    path = tmp_path / "model"
    write_checkpoint(path, layers=4, seed=1)
    checkpoint = Checkpoint.open(path)
    read_part(checkpoint, "layers.0", None)
    replace_weights(path, 4, seed=2)
    assert checkpoint.changed_file() == path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since"):
        read_part(checkpoint, "layers.0", None)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since"):
        read_part(checkpoint, "layers.0", None)
