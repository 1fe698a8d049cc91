"""The MTP head of a checkpoint on a hub: headers to plan with, then the head's tensors, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from mtp.checkpoint.convert.output import check_room
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import is_head
from mtp.checkpoint.format.shard import Entry, ShardWriter
from mtp.checkpoint.hub.journal import Journal
from mtp.checkpoint.hub.ranges import read_tensors
from mtp.checkpoint.hub.remote_checkpoint import open_remote
from mtp.checkpoint.hub.repo import HubRepo
from proto.errors import CheckpointError
from proto.progress import OnProgress


class RemoteHead:
    """A repo's MTP head. `checkpoint` has config, layout, and where the head's tensors lie in the repo.

    A context manager: entering it reads headers and no tensor, and raises CheckpointError when the repo cannot be read
    or is no checkpoint.
    """

    def __init__(self, repo: str) -> None:
        self._hub = HubRepo(repo)

    def __enter__(self) -> RemoteHead:
        try:
            self.checkpoint = open_remote(self._hub, is_head)
        except BaseException:
            self._hub.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hub.close()

    @property
    def received(self) -> int:
        """Bytes of files that came over the network."""
        return self._hub.received

    def fetch(
        self,
        names: Sequence[str],
        directory: Path,
        on_progress: OnProgress,
        beside: int = 0,
    ) -> Checkpoint:
        """The same checkpoint with tensors `names` in a file in `directory`, where a broken call is gone on with.

        Raises CheckpointError when they cannot be had, or the disk has no room for them and `beside` bytes more.
        """
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{directory}: cannot be made: {error.strerror}") from error
        remote = self.checkpoint
        infos = {name: remote.tensors[name] for name in names}
        infos = dict(sorted(infos.items(), key=lambda item: (item[1].file, item[1].start)))
        entries = [Entry(name, info.dtype, info.shape) for name, info in infos.items()]
        # The commit is in the name: what broke off at another one is not gone on with.
        writer = ShardWriter(directory / f"{self._hub.revision}.safetensors", entries, "pt")
        if not writer.is_finished():
            check_room(directory, writer.missing_bytes() + beside)
            with writer:
                journal = Journal(directory / f"{self._hub.revision}.journal", writer)
                journal.resume()
                try:
                    for piece in read_tensors(self._hub, list(infos.values()), writer.written):
                        journal.write(piece)
                        on_progress(writer.written, writer.nbytes)
                except BaseException:
                    with suppress(CheckpointError):  # the disk may be full; the first error is told
                        journal.note()
                    raise
                writer.finish()
        return Checkpoint.assemble(directory, remote.config, remote.layout, writer.tensors())
