"""Which checkpoint on this machine is the one the coordinator means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mtp.checkpoint.checkpoint import Checkpoint
from mtp.checkpoint.resolve import BUILTIN, resolve_model
from proto import cluster_pb2 as pb
from proto.errors import CheckpointError


class LocalModels:
    """Checkpoints this worker can read, with their fingerprints computed once. Runs off the event loop."""

    def __init__(self, own: Path | None) -> None:
        self.own = own
        self._known: dict[Path, tuple[Checkpoint, str]] = {}

    def find(self, wanted: pb.ModelRef) -> Checkpoint:
        """The first checkpoint here whose content has the wanted fingerprint.

        Looks at the worker's own --model, the path the coordinator uses, and the repo in the local cache. Raises
        CheckpointError when none is the same, naming what was found instead.
        """
        others: list[str] = []
        for path in self._candidates(wanted):
            try:
                checkpoint, fingerprint = self.open(path)
            except CheckpointError as error:
                others.append(str(error))
                continue
            if fingerprint == wanted.fingerprint:
                return checkpoint
            others.append(f"{path.name} has other content (fingerprint {fingerprint[:12]})")
        found = "; ".join(others) or "there is none"
        raise CheckpointError(
            f"no checkpoint here is {wanted.name} (fingerprint {wanted.fingerprint[:12]}): {found}. "
            "Start mtp-worker with --model and the same checkpoint as the coordinator's",
            public=f"a worker lacks the checkpoint {wanted.name}",
        )

    def fingerprint_of(self, wanted: pb.ModelRef) -> str:
        """Of the wanted model, or else of the worker's own; empty when there is neither."""
        try:
            return self.open(self.find(wanted).path)[1]
        except CheckpointError:
            return ""

    def open(self, path: Path) -> tuple[Checkpoint, str]:
        if path not in self._known:
            checkpoint = Checkpoint.open(path)
            self._known[path] = (checkpoint, checkpoint.fingerprint())
        return self._known[path]

    def _candidates(self, wanted: pb.ModelRef) -> Iterator[Path]:
        if self.own is not None:
            yield self.own
        if wanted.path and Path(wanted.path).is_dir():
            yield Path(wanted.path)
        if wanted.name == BUILTIN:
            yield resolve_model(BUILTIN)
        elif wanted.repo:
            yield resolve_model(wanted.repo)
