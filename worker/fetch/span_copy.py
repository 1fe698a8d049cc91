"""What this machine has of a checkpoint that lies elsewhere: whole parts, each in a file of its own.

    HF_HOME/mtp-cluster/FINGERPRINT/copy.json                    config and layout, as the coordinator's copy has them
    HF_HOME/mtp-cluster/FINGERPRINT/parts/layers.3.safetensors   that part's tensors, under their stored names
    HF_HOME/mtp-cluster/FINGERPRINT/parts/layers.4.safetensors.part   one that is not whole yet

There is no config.json, so nobody takes it for a checkpoint; and a part has its name only once every tensor in it was
verified. It may be deleted whenever no worker runs.
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
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.header import read_header
from mtp.checkpoint.format.names import Layout, local_name, split_part
from mtp.checkpoint.format.shard import Entry, ShardWriter, replace_text
from proto.errors import CheckpointError, ProtocolError

_ABOUT = "copy.json"
_FORMS: dict[Layout, str] = {"raw": "pt", "mlx": "mlx"}
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def copies_dir() -> Path:
    """Beside the hub's own cache, so that it lies on the disk the user chose for models."""
    return Path(constants.HF_HOME) / "mtp-cluster"


@dataclass(frozen=True)
class SpanCopy:
    """The copy of one checkpoint in `path`; `config` is the object of its config.json."""

    path: Path
    config: dict[str, Any]
    layout: Layout

    @classmethod
    def of(cls, fingerprint: str, config: str, layout: str) -> SpanCopy:
        """The copy with this fingerprint, which need not be there yet.

        Raises ProtocolError for values no checkpoint has, CheckpointError for a config this release cannot serve.
        """
        path = _path(fingerprint)
        if layout not in ("raw", "mlx"):
            raise ProtocolError(f"layout {layout!r:.40} is neither raw nor mlx")
        try:
            found = json.loads(config)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the offered config is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ProtocolError("the offered config is not an object")
        copy = cls(path, found, "raw" if layout == "raw" else "mlx")
        copy.model_config()
        return copy

    @classmethod
    def find(cls, fingerprint: str) -> SpanCopy | None:
        """The copy of that fingerprint on this machine, if there is one. Raises CheckpointError when it is damaged."""
        try:
            about = _path(fingerprint) / _ABOUT
            found = json.loads(about.read_text(encoding="utf-8"))
            return cls(about.parent, found["config"], found["layout"])
        except (FileNotFoundError, ProtocolError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{_path(fingerprint)}: cannot be read ({error!r:.80}); delete it, it will be fetched again"
            ) from error

    def begin(self) -> None:
        """Make the directory. Raises CheckpointError when it cannot be made."""
        try:
            (self.path / "parts").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be made ({error.strerror}); set HF_HOME to a directory with room"
            ) from error
        about = {"config": self.config, "layout": self.layout}
        replace_text(self.path / _ABOUT, json.dumps(about, indent=2))

    def model_config(self) -> ModelConfig:
        return ModelConfig.parse(self.path / _ABOUT, self.config)

    def part_of(self, stored: str) -> str:
        """The part a stored tensor belongs to. Raises ProtocolError for a tensor of none."""
        local = local_name(stored)
        found = local and split_part(local, self.model_config().num_layers)
        if not found:
            raise ProtocolError(f"tensor {stored!r:.120} is of no part of this model")
        return found[0]

    def writer(self, part: str, entries: Sequence[Entry]) -> ShardWriter:
        """Writes the file of one part."""
        return ShardWriter(
            self.path / "parts" / f"{part}.safetensors", entries, _FORMS[self.layout]
        )

    def checkpoint(self) -> Checkpoint:
        """What there is, as a checkpoint: to be asked for the parts it has, and no others."""
        tensors = {
            name: info
            for file in sorted((self.path / "parts").glob("*.safetensors"))
            for name, info in read_header(file).tensors.items()
        }
        return Checkpoint.assemble(self.path, self.model_config(), self.layout, tensors)


def _path(fingerprint: str) -> Path:
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ProtocolError(f"{fingerprint!r:.80} is no fingerprint")
    return copies_dir() / fingerprint
