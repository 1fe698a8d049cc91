"""The MTP head of a checkpoint on a hub: its headers for the plan, and its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from mtp.checkpoint.convert.output import check_free_space
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
    """The MTP head of a repo. `checkpoint` has the config, the layout and the places of the head's tensors.

    A context manager. Entering it reads headers but no tensors, and raises CheckpointError when the repo cannot be read
    or is not a checkpoint.
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
        """Bytes of files received over the network."""
        return self._hub.received

    def fetch(
        self,
        names: Sequence[str],
        directory: Path,
        on_progress: OnProgress,
        beside: int = 0,
    ) -> Checkpoint:
        """Fetch the tensors `names` into a file in `directory`, and return the checkpoint with its tensors there.

        An interrupted call is resumed. Raises CheckpointError when the tensors cannot be read, or when the disk has not
        enough space for them and `beside` further bytes.
        """
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{directory}: cannot be created: {error.strerror}") from error
        remote = self.checkpoint
        infos = {name: remote.tensors[name] for name in names}
        infos = dict(sorted(infos.items(), key=lambda item: (item[1].file, item[1].start)))
        entries = [Entry(name, info.dtype, info.shape) for name, info in infos.items()]
        # The name contains the commit, so that a part file of another commit is not continued.
        writer = ShardWriter(directory / f"{self._hub.revision}.safetensors", entries, "pt")
        if not writer.is_finished():
            check_free_space(directory, writer.missing_bytes() + beside)
            with writer:
                journal = Journal(directory / f"{self._hub.revision}.journal", writer)
                journal.resume()
                try:
                    for piece in read_tensors(self._hub, list(infos.values()), writer.written):
                        journal.write(piece)
                        on_progress(writer.written, writer.nbytes)
                except BaseException:
                    with suppress(
                        CheckpointError
                    ):  # a full disk; the first error is the one to report
                        journal.record_progress()
                    raise
                writer.finish()
        return Checkpoint.assemble(directory, remote.config, remote.layout, writer.tensors())
