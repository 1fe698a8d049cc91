"""The MTP head of a checkpoint on a hub: headers to plan with, then the head's tensors, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mtp.checkpoint.checkpoint import INDEX, Checkpoint, layout_of
from mtp.checkpoint.config import ModelConfig
from mtp.checkpoint.header import Header
from mtp.checkpoint.names import is_head
from mtp.checkpoint.shard import Entry, ShardWriter
from proto.errors import CheckpointError
from worker.fetch.hub import HubRepo
from worker.fetch.ranges import read_tensors

_CONVOLUTION = "linear_attn.conv1d.weight"
_ONLY_FILE = "model.safetensors"


class RemoteHead:
    """A repo's MTP head. `checkpoint` has config, layout, and where the head's tensors lie in the repo.

    A context manager: entering it reads headers and no tensor, and raises CheckpointError when the repo cannot be read
    or is no checkpoint.
    """

    def __init__(self, repo: str) -> None:
        self._hub = HubRepo(repo)

    def __enter__(self) -> RemoteHead:
        try:
            self.checkpoint = self._open()
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
        self, names: Sequence[str], directory: Path, on_progress: Callable[[int, int], None]
    ) -> Checkpoint:
        """The same checkpoint with tensors `names` in a file in `directory`, where a broken call is gone on with."""
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
            with writer:
                for piece in read_tensors(self._hub, list(infos.values()), skip=writer.written):
                    writer.write(piece)
                    on_progress(writer.written, writer.nbytes)
                writer.finish()
        return Checkpoint.assemble(directory, remote.config, remote.layout, writer.tensors())

    def _open(self) -> Checkpoint:
        name = Path(self._hub.repo)
        config = ModelConfig.parse(name / "config.json", _read_object(self._hub, "config.json"))
        headers = _headers(self._hub)
        tensors = {
            stored: info
            for header in headers.values()
            for stored, info in header.tensors.items()
            if is_head(stored)
        }
        return Checkpoint.assemble(name, config, layout_of(name, headers), tensors)


def _headers(hub: HubRepo) -> dict[Path, Header]:
    """Of the files with the head, and of one whose convolution tells the layout."""
    if hub.size(INDEX) is None:
        return {Path(_ONLY_FILE): hub.read_header(_ONLY_FILE)}
    weight_map = _read_object(hub, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{hub.repo}: {INDEX} has no weight_map")
    files = {file for name, file in weight_map.items() if is_head(name)}
    telling = [file for name, file in weight_map.items() if name.endswith(_CONVOLUTION)]
    if files.isdisjoint(telling):
        files.update(telling[:1])
    return {Path(file): hub.read_header(file) for file in sorted(files)}


def _read_object(hub: HubRepo, file: str) -> dict[str, Any]:
    content = hub.read(file)
    if content is None:
        raise CheckpointError(f"{hub.repo}: has no {file}; is it a checkpoint?")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{hub.repo}: {file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{hub.repo}: {file} is not an object")
    return found
