"""Fill a copy with what the coordinator offers: bytes from it or from a hub, every tensor held to its hash.

All of it blocks, and runs on a thread of its own. Broken off at any byte, the next call goes on from there.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

from mtp.checkpoint.format.header import TensorInfo
from mtp.checkpoint.format.shard import BusyFileError, Entry, ShardWriter
from mtp.checkpoint.hub.ranges import read_tensors
from mtp.checkpoint.hub.repo import HubRepo
from proto import cluster_pb2 as pb
from proto.dtype import STORED_BYTES
from proto.errors import CheckpointError, ProtocolError
from proto.terminal.size import format_size
from worker.fetch.span_copy import SpanCopy

PROGRESS_SECONDS = 0.5
"""Between two words of progress: the coordinator takes long silence for a failure."""

BUSY_SECONDS = 0.2
"""Between two looks at a file that another worker of this machine is fetching."""

READ_BACK_BYTES = 4 * 1024 * 1024

Pull = Callable[[], pb.Weights]
"""The coordinator's next message; raises when there is none."""

Tell = Callable[[pb.WeightsReply], None]


class StoppedError(Exception):
    """The call has ended; nobody waits for the rest."""


@dataclass(frozen=True)
class Tensor:
    """One offered tensor: its `number` in the offer, where it lies in the repo, and what it is."""

    number: int
    part: str
    entry: Entry
    info: TensorInfo


class Source(Protocol):
    """Where the bytes of tensors come from."""

    def start(self, infos: list[TensorInfo], skip: int) -> None:
        """All bytes of these but the first `skip` are wanted next."""

    def piece(self, most: int) -> bytes:
        """The next of them, at most so many."""

    def mismatch(self, name: str) -> CheckpointError:
        """What to say of a tensor that is not the coordinator's."""


class _Shared:
    """Bytes from the coordinator: pieces of a tensor, in order."""

    def __init__(self, pull: Pull) -> None:
        self._pull = pull

    def start(self, infos: list[TensorInfo], skip: int) -> None:
        """The coordinator knows from the wanted tensors what to send."""

    def piece(self, most: int) -> bytes:
        message = self._pull()
        if message.WhichOneof("body") != "piece" or not 0 < len(message.piece) <= most:
            raise ProtocolError("the coordinator sent something else than the next bytes")
        return message.piece

    def mismatch(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"tensor {name} was damaged on its way from the coordinator: its SHA-256 is another; try again"
        )


class _FromHub:
    """Bytes from a hub; what does not fit into one piece waits for the next."""

    def __init__(self, hub: HubRepo) -> None:
        self._hub = hub
        self._pieces: Iterator[bytes] = iter(())
        self._rest = b""

    def start(self, infos: list[TensorInfo], skip: int) -> None:
        self._pieces, self._rest = read_tensors(self._hub, infos, skip), b""

    def piece(self, most: int) -> bytes:
        try:
            data = self._rest or next(self._pieces)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. With mtp-coord serve --share-weights the coordinator sends its own copy",
                public=error.public,
            ) from error
        self._rest = data[most:]
        return data[:most]

    def mismatch(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self._hub.repo}: tensor {name} is not the coordinator's, its SHA-256 is another; one of the two "
            "copies is damaged. With mtp-coord serve --share-weights the coordinator sends its own"
        )


def fill(offer: pb.WeightsOffer, pull: Pull, tell: Tell, stop: threading.Event) -> int:
    """Bring what `offer` has and this machine lacks. Returns how many bytes came.

    Raises ProtocolError for an offer or a message that makes no sense; CheckpointError for a tensor that is not the
    coordinator's, a hub that cannot be read, or a disk that is full; StoppedError once `stop` is set.
    """
    copy = SpanCopy.of(offer.model.fingerprint, offer.config, offer.layout)
    tensors = _tensors(offer, copy)
    copy.begin()
    if offer.share:
        return _Filling(copy, tensors, _Shared(pull), pull, tell, stop).run()
    hub = HubRepo(offer.model.repo, offer.model.revision)
    try:
        return _Filling(copy, tensors, _FromHub(hub), pull, tell, stop).run()
    finally:
        hub.close()


def _tensors(offer: pb.WeightsOffer, copy: SpanCopy) -> list[Tensor]:
    """The offered tensors, checked before any byte of them is taken."""
    if not offer.share and not (offer.model.repo and offer.model.revision):
        raise ProtocolError("an offer that shares no bytes names no repo and revision")
    found = []
    for number, offered in enumerate(offer.tensors):
        entry = Entry(offered.name, offered.dtype, tuple(offered.shape))
        if offered.dtype not in STORED_BYTES or entry.nbytes != offered.nbytes:
            raise ProtocolError(f"tensor {offered.name!r:.120} has not the size of its shape")
        info = TensorInfo(
            Path(offered.file), offered.dtype, entry.shape, offered.start, entry.nbytes
        )
        found.append(Tensor(number, copy.part_of(offered.name), entry, info))
    if len({tensor.entry.name for tensor in found}) != len(found):
        raise ProtocolError("a tensor is offered twice")
    runs = [part for part, _ in groupby(tensor.part for tensor in found)]
    if len(set(runs)) != len(runs):
        raise ProtocolError("the tensors of a part do not stand together")
    return found


class _Filling:
    """One call of `fill`: part after part, each under the lock of its file."""

    def __init__(
        self,
        copy: SpanCopy,
        tensors: list[Tensor],
        source: Source,
        pull: Pull,
        tell: Tell,
        stop: threading.Event,
    ) -> None:
        self.parts: list[tuple[ShardWriter, list[Tensor]]] = []
        for part, group in groupby(tensors, key=lambda tensor: tensor.part):
            members = list(group)
            writer = copy.writer(part, [tensor.entry for tensor in members])
            self.parts.append((writer, members))
        self.copy = copy
        self.source = source
        self.pull = pull
        self.tell = tell
        self.stop = stop
        self.received = 0
        self.done = 0
        self.total = 0
        self._told = 0.0

    def run(self) -> int:
        missing = [(w, tensors) for w, tensors in self.parts if not w.is_finished()]
        self.total = sum(writer.nbytes for writer, _ in missing)
        self._check_room(sum(writer.missing_bytes() for writer, _ in missing))
        for writer, tensors in missing:
            before = self.done
            while not writer.is_finished():
                try:
                    with writer:
                        if writer.is_finished():  # by another worker, just before we had its lock
                            writer.discard()
                        else:
                            self._part(writer, tensors)
                except BusyFileError:  # another worker of this machine fetches it: it is for both
                    self._tell_progress()
                    self._check_stop(BUSY_SECONDS)
            self.done = before + writer.nbytes
        return self.received

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.copy.path).free
        if needed > free:
            raise CheckpointError(
                f"{self.copy.path}: {format_size(needed)} are to be fetched, and the disk has {format_size(free)} "
                "left; make room, or set HF_HOME to a directory on another disk",
                public="a worker's disk is full",
            )

    def _part(self, writer: ShardWriter, tensors: list[Tensor]) -> None:
        """Receive what is missing of one part, and give its file its name."""
        wanted = pb.WantedTensors()
        start = 0
        for tensor in tensors:
            have = min(max(0, writer.written - start), tensor.info.nbytes)
            wanted.tensors.add(number=tensor.number, have=have)
            start += tensor.info.nbytes
        self.tell(pb.WeightsReply(wanted=wanted))
        self.done += writer.written
        self.source.start([tensor.info for tensor in tensors], writer.written)
        start = 0
        for tensor in tensors:
            self._tensor(writer, tensor, start)
            start += tensor.info.nbytes
        writer.finish()

    def _tensor(self, writer: ShardWriter, tensor: Tensor, start: int) -> None:
        """Receive the rest of a tensor that begins at byte `start` of the part, and hold the whole to its hash."""
        end = start + tensor.info.nbytes
        digest = hashlib.sha256()
        for at in range(start, min(writer.written, end), READ_BACK_BYTES):
            self._check_stop()
            digest.update(writer.read(at, min(READ_BACK_BYTES, end - at)))
        while writer.written < end:
            self._check_stop()
            piece = self.source.piece(end - writer.written)
            digest.update(piece)
            writer.write(piece)
            self.received += len(piece)
            self.done += len(piece)
            if time.monotonic() - self._told > PROGRESS_SECONDS:
                self._tell_progress()
        message = self.pull()
        if message.WhichOneof("body") != "sha256":
            raise ProtocolError("the coordinator sent something else than a tensor's hash")
        if message.sha256 != digest.digest():
            writer.rewind(start)  # the next call fetches it anew
            raise self.source.mismatch(tensor.entry.name)

    def _tell_progress(self) -> None:
        self._told = time.monotonic()
        progress = pb.LoadBytes(done=self.done, total=self.total)
        self.tell(pb.WeightsReply(progress=progress))

    def _check_stop(self, seconds: float = 0.0) -> None:
        if self.stop.wait(seconds) if seconds else self.stop.is_set():
            raise StoppedError
