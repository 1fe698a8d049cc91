"""The checkpoints on this machine, and the one with the fingerprint that the coordinator requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import BUILTIN, find_model, resolve_model
from proto import cluster_pb2 as pb
from proto.errors import CheckpointError
from worker.fetch.fill import SpanCopy


class LocalModels:
    """The checkpoints that this worker can read, with cached fingerprints. Methods do not run on the event loop."""

    def __init__(self, own: Path | None) -> None:
        self.own = own
        self._known: dict[Path, tuple[Checkpoint, str]] = {}

    def find(self, wanted: pb.ModelRef) -> Checkpoint:
        """Return the first checkpoint with the fingerprint of `wanted`, or its fetched parts.

        The candidates are the worker's own --model, the path that the coordinator uses, the repo in the local cache,
        and the copy that Provide made. Raises CheckpointError that names the other checkpoints if none matches.
        """
        try:
            return self.find_whole(wanted)
        except CheckpointError:
            copy = SpanCopy.find(wanted.fingerprint)
            if copy is None:
                raise
            return copy.checkpoint()

    def find_whole(self, wanted: pb.ModelRef) -> Checkpoint:
        """Return the first whole checkpoint with the fingerprint of `wanted`. Raises CheckpointError like `find`."""
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
        found = "; ".join(others) or "it has none"
        raise CheckpointError(
            f"no checkpoint here is {wanted.name} (fingerprint {wanted.fingerprint[:12]}): {found}. "
            "Start mtp-worker with --model and the coordinator's checkpoint, or mtp-coord serve with "
            "--share-weights",
            public=f"a worker lacks the checkpoint {wanted.name}",
        )

    def fingerprint_of(self, wanted: pb.ModelRef) -> str:
        """Return the fingerprint of the wanted model if this machine has all of it, else an empty string."""
        try:
            return self.open(self.find_whole(wanted).path)[1]
        except CheckpointError:
            return ""

    def open(self, path: Path) -> tuple[Checkpoint, str]:
        """Return the checkpoint in `path` and its fingerprint, from the cache if possible."""
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
        elif wanted.repo and (cached := find_model(wanted.repo)) is not None:
            yield cached
