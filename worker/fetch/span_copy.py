"""The copy of some parts of a checkpoint on this machine, with one file for each whole part.

    HF_HOME/mtp-cluster/FINGERPRINT/copy.json                    config and layout, as the coordinator's copy has them
    HF_HOME/mtp-cluster/FINGERPRINT/parts/layers.3.safetensors   that part's tensors, under their stored names
    HF_HOME/mtp-cluster/FINGERPRINT/parts/layers.4.safetensors.part   an incomplete part

The directory has no config.json, so no program mistakes it for a checkpoint. A part gets its final name after every
tensor in it was verified. The directory may be deleted whenever no worker runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ModelConfig, parse_json_object, read_json_object
from mtp.checkpoint.format.names import Layout, local_name, split_part
from mtp.checkpoint.format.shard import Entry, ShardWriter, read_header, replace_text
from proto.errors import CheckpointError, ProtocolError

_ABOUT = "copy.json"
_FORMS: dict[Layout, str] = {"raw": "pt", "mlx": "mlx"}
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def copies_dir() -> Path:
    """Return the directory of all copies. It is next to the hub's cache, on the disk that the user chose for models."""
    return Path(constants.HF_HOME) / "mtp-cluster"


@dataclass(frozen=True)
class SpanCopy:
    """The copy of one checkpoint in `path`; `config` is the object of its config.json."""

    path: Path
    config: dict[str, Any]
    layout: Layout

    @classmethod
    def of(cls, fingerprint: str, config: str, layout: str) -> SpanCopy:
        """Return the copy with this fingerprint, which may not exist yet.

        Raises ProtocolError for invalid values, and CheckpointError for a config that this release cannot serve.
        """
        path = _path(fingerprint)
        if layout not in ("raw", "mlx"):
            raise ProtocolError(f"layout {layout!r:.40} is neither raw nor mlx")
        try:
            found = parse_json_object(config.encode(), "the offered config")
        except CheckpointError as error:
            raise ProtocolError(str(error)) from error
        copy = cls(path, found, "raw" if layout == "raw" else "mlx")
        copy.model_config()
        return copy

    @classmethod
    def find(cls, fingerprint: str) -> SpanCopy | None:
        """Return the copy with this fingerprint, or None. Raises CheckpointError for a damaged copy."""
        try:
            about = _path(fingerprint) / _ABOUT
        except ProtocolError:
            return None
        if not about.exists():
            return None
        try:
            found = read_json_object(about)
            return cls(about.parent, found["config"], found["layout"])
        except (CheckpointError, KeyError) as error:
            raise CheckpointError(
                f"{about.parent}: cannot be read ({error!r:.80}). Delete it; the worker will fetch it again"
            ) from error

    def begin(self) -> None:
        """Make the directory. Raises CheckpointError when that fails."""
        try:
            (self.path / "parts").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be made: {error.strerror}. Set HF_HOME to a writable directory"
            ) from error
        about = {"config": self.config, "layout": self.layout}
        replace_text(self.path / _ABOUT, json.dumps(about, indent=2))

    def model_config(self) -> ModelConfig:
        """Return the parsed config. Raises CheckpointError for a model that this release cannot serve."""
        return ModelConfig.parse(self.path / _ABOUT, self.config)

    def part_of(self, stored: str) -> str:
        """Return the part that a stored tensor belongs to. Raises ProtocolError for an unknown tensor."""
        local = local_name(stored)
        found = local and split_part(local, self.model_config().num_layers)
        if not found:
            raise ProtocolError(f"tensor {stored!r:.120} belongs to no part of this model")
        return found[0]

    def writer(self, part: str, entries: Sequence[Entry]) -> ShardWriter:
        """Return the writer of the file of one part."""
        return ShardWriter(
            self.path / "parts" / f"{part}.safetensors", entries, _FORMS[self.layout]
        )

    def checkpoint(self) -> Checkpoint:
        """Return a checkpoint of the complete parts. It has no other parts."""
        tensors = {
            name: info
            for file in sorted((self.path / "parts").glob("*.safetensors"))
            for name, info in read_header(file).tensors.items()
        }
        return Checkpoint.assemble(self.path, self.model_config(), self.layout, tensors)


def _path(fingerprint: str) -> Path:
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ProtocolError(f"invalid fingerprint {fingerprint!r:.80}")
    return copies_dir() / fingerprint
