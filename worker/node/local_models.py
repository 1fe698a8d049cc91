"""Which checkpoint on this machine is the one the coordinator means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import BUILTIN, find_model, resolve_model
from proto import cluster_pb2 as pb
from proto.errors import CheckpointError
from proto.span import Span
from worker.fetch.span_copy import SpanCopy


class LocalModels:
    """Checkpoints this worker can read, with their fingerprints computed once. Runs off the event loop."""

    def __init__(self, own: Path | None) -> None:
        self.own = own
        self._known: dict[Path, tuple[Checkpoint, str]] = {}

    def check_own(self, layers: Span | None) -> None:
        """Raise CheckpointError for a --model that cannot be served, SpanError for --layers that it does not have."""
        if self.own is not None:
            checkpoint, _ = self.open(self.own)
            if layers is not None:
                layers.check_within(checkpoint.config.num_layers)

    def find(self, wanted: pb.ModelRef) -> Checkpoint:
        """The first checkpoint here whose content has the wanted fingerprint, or the parts of it that were fetched.

        Looks at the worker's own --model, the path the coordinator uses, the repo in the local cache, and what Provide
        brought. Raises CheckpointError when none is the same, naming what was found instead.
        """
        try:
            return self.find_whole(wanted)
        except CheckpointError:
            copy = SpanCopy.find(wanted.fingerprint)
            if copy is None:
                raise
            return copy.checkpoint()

    def find_whole(self, wanted: pb.ModelRef) -> Checkpoint:
        """As `find`, but of whole checkpoints only."""
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
            "Start mtp-worker with --model and the same checkpoint as the coordinator's, or mtp-coord serve with "
            "--share-weights",
            public=f"a worker lacks the checkpoint {wanted.name}",
        )

    def fingerprint_of(self, wanted: pb.ModelRef) -> str:
        """Of the wanted model if it is whole here; else empty."""
        try:
            return self.open(self.find_whole(wanted).path)[1]
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
        elif wanted.repo and (cached := find_model(wanted.repo)) is not None:
            yield cached
