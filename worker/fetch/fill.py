"""The local copy of offered tensors, and their transfer from the coordinator or from a hub, each checked by its hash.

`provide` runs on the event loop, all other functions on a separate thread. An interrupted call continues in the next.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ModelConfig, read_json_object
from mtp.checkpoint.format.names import Layout
from mtp.checkpoint.format.shard import (
    Entry,
    ShardWriter,
    TensorInfo,
    check_free_space,
    parse_json_object,
    read_header,
    replace_bytes,
)
from mtp.checkpoint.hub.repo import HubRepo
from proto import cluster_pb2 as pb
from proto.errors import CheckpointError, ClusterError, DeadlineError, ProtocolError
from proto.rpc.listener import first_message
from proto.rpc.status_codes import to_status
from proto.terminal.progress import format_size
from proto.wire import STORED_BYTES
from worker.engine.engine_thread import run_into

_ABOUT = "copy.json"
_FORMS: dict[Layout, str] = {"raw": "pt", "mlx": "mlx"}
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class SpanCopy:
    """The copy of one checkpoint in `path`; `config` is the object of its config.json."""

    path: Path
    config: dict[str, Any]
    layout: Layout

    @classmethod
    def of(cls, fingerprint: str, config: str, layout: str) -> SpanCopy:
        """Return the copy with this fingerprint, which may not exist yet. Raises ProtocolError and CheckpointError."""
        if not _FINGERPRINT.fullmatch(fingerprint) or layout not in _FORMS:
            raise ProtocolError(f"invalid fingerprint {fingerprint!r:.80} or layout {layout!r:.40}")
        found = parse_json_object(config.encode(), "the offered config")
        return cls(_path(fingerprint), found, layout)

    @classmethod
    def find(cls, fingerprint: str) -> SpanCopy | None:
        """Return the copy with this fingerprint, or None. Raises CheckpointError for a damaged copy."""
        about = _path(fingerprint) / _ABOUT
        if not (_FINGERPRINT.fullmatch(fingerprint) and about.exists()):
            return None
        try:
            found = read_json_object(about)
            return cls(about.parent, found["config"], found["layout"])
        except (CheckpointError, KeyError) as error:
            raise CheckpointError(
                f"{about.parent}: cannot be read ({error!r:.80}). Delete it; the worker will fetch it again"
            ) from error

    def begin(self) -> None:
        """Make the directory. Raises CheckpointError."""
        try:
            (self.path / "parts").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be made: {error.strerror}. Set HF_HOME to a writable directory"
            ) from error
        about = {"config": self.config, "layout": self.layout}
        replace_bytes(self.path / _ABOUT, json.dumps(about).encode())

    def model_config(self) -> ModelConfig:
        """Return the parsed config. Raises CheckpointError for a model that this release cannot serve."""
        return ModelConfig.parse(self.path / _ABOUT, self.config)

    def writer(self, part: str, entries: Sequence[Entry]) -> ShardWriter:
        """Return the writer of the file of one part."""
        file = self.path / "parts" / f"{part}.safetensors"
        return ShardWriter(file, entries, _FORMS[self.layout])

    def checkpoint(self) -> Checkpoint:
        """Return a checkpoint of the complete parts. It has no other parts."""
        tensors = {
            name: info
            for file in sorted((self.path / "parts").glob("*.safetensors"))
            for name, info in read_header(file).tensors.items()
        }
        return Checkpoint.assemble(self.path, self.model_config(), self.layout, tensors)


def _path(fingerprint: str) -> Path:
    """Return the directory of a copy, next to the hub's cache, on the disk that the user chose for models."""
    return Path(constants.HF_HOME) / "mtp-cluster" / fingerprint


PROGRESS_SECONDS = 0.5
"""Seconds between two progress messages. The coordinator treats a long silence as a failure."""

BUSY_SECONDS = 0.2
"""Seconds between two checks of a file that another worker of this machine fetches."""

Pull = Callable[[], pb.Weights]
"""Returns the coordinator's next message; raises when the call has ended."""

_NO_BYTES = "the coordinator sent another message instead of the next bytes"

SendReply = Callable[[pb.WeightsReply], None]


class StoppedError(Exception):
    """The end of the call, for the thread that fills the copy."""


@dataclass(frozen=True)
class Tensor:
    """One offered tensor: its `number` in the offer, and its place in the repo."""

    number: int
    entry: Entry
    info: TensorInfo


def fill(offer: pb.WeightsOffer, pull: Pull, send_reply: SendReply, stop: threading.Event) -> int:
    """Fetch the offered tensors that this machine lacks, and return the number of received bytes.

    Raises ProtocolError for an invalid offer, CheckpointError, and StoppedError after `stop` is set.
    """
    copy = SpanCopy.of(offer.model.fingerprint, offer.config, offer.layout)
    parts = _offered_parts(offer, copy.model_config())
    copy.begin()
    if offer.share:
        return _Filling(copy, parts, None, pull, send_reply, stop).run()
    with HubRepo(offer.model.repo, offer.model.revision) as hub:
        return _Filling(copy, parts, hub, pull, send_reply, stop).run()


def _offered_parts(offer: pb.WeightsOffer, config: ModelConfig) -> dict[str, list[Tensor]]:
    """Return the offered tensors by part, after checks that precede every transfer. Raises ProtocolError."""
    if not offer.share and not (offer.model.repo and offer.model.revision):
        raise ProtocolError("an offer without bytes names no repo and revision")
    if len({offered.name for offered in offer.tensors}) != len(offer.tensors):
        raise ProtocolError("the offer names a tensor twice")
    parts: dict[str, list[Tensor]] = {}
    for number, offered in enumerate(offer.tensors):
        name, dtype, start = offered.name, offered.dtype, offered.start
        entry = Entry(name, dtype, tuple(offered.shape))
        if dtype not in STORED_BYTES or entry.nbytes != offered.nbytes:
            raise ProtocolError(f"the size of tensor {name!r:.120} contradicts its shape")
        if Path(offered.file).is_absolute() or ".." in Path(offered.file).parts:
            raise ProtocolError(f"{offered.file!r:.120} is not the name of a file in a repo")
        place = config.place(name)
        if place is None:
            raise ProtocolError(f"tensor {name!r:.120} belongs to no part of this model")
        info = TensorInfo(Path(offered.file), dtype, entry.shape, start, entry.nbytes)
        parts.setdefault(place.part, []).append(Tensor(number, entry, info))
    return parts


@dataclass(eq=False)
class _Filling:
    """One call of `fill`. It locks each part that it fetches, from `hub`, or from the coordinator without one."""

    copy: SpanCopy
    parts: dict[str, list[Tensor]]
    hub: HubRepo | None
    pull: Pull
    send_reply: SendReply
    stop: threading.Event
    pieces: Iterator[bytes] = field(init=False)
    rest: bytes = b""
    received: int = 0
    done: int = 0
    total: int = 0
    _reported_at: float = 0.0

    def run(self) -> int:
        """Fetch all missing parts, and return the number of received bytes."""
        missing: list[tuple[ShardWriter, list[Tensor]]] = []
        for part, tensors in self.parts.items():
            writer = self.copy.writer(part, [tensor.entry for tensor in tensors])
            if not writer.is_finished():
                missing.append((writer, tensors))
        self.total = sum(writer.nbytes for writer, _ in missing)
        needed = sum(writer.missing_bytes() for writer, _ in missing)
        check_free_space(self.copy.path, needed)
        for writer, tensors in missing:
            before = self.done
            writer.complete(partial(self._fetch_part, writer, tensors), self._wait)
            self.done = before + writer.nbytes
        return self.received

    def _wait(self) -> None:
        """Wait for another worker of this machine that fetches the part."""
        self._send_progress()
        self._check_stop(BUSY_SECONDS)

    def _fetch_part(self, writer: ShardWriter, tensors: list[Tensor]) -> None:
        wanted = pb.WantedTensors()
        starts = list(accumulate((tensor.info.nbytes for tensor in tensors), initial=0))
        for tensor, start in zip(tensors, starts, strict=False):
            have = min(max(0, writer.written - start), tensor.info.nbytes)
            wanted.tensors.add(number=tensor.number, have=have)
        self.send_reply(pb.WeightsReply(wanted=wanted))
        self.done += writer.written
        self.pieces = self._read([tensor.info for tensor in tensors], writer.written)
        self.rest = b""
        for tensor, start in zip(tensors, starts, strict=False):
            self._tensor(writer, tensor, start)

    def _tensor(self, writer: ShardWriter, tensor: Tensor, start: int) -> None:
        """Receive the rest of a tensor that begins at byte `start` of the part, and check the hash of the whole."""
        end = start + tensor.info.nbytes
        digest = hashlib.sha256()
        for piece in writer.read_back(start, end):
            self._check_stop()
            digest.update(piece)
        while writer.written < end:
            self._check_stop()
            piece = self._next_piece(end - writer.written)
            digest.update(piece)
            writer.write(piece)
            self.received += len(piece)
            self.done += len(piece)
            if time.monotonic() - self._reported_at > PROGRESS_SECONDS:
                self._send_progress()
        message = self.pull()
        if message.WhichOneof("body") != "sha256":
            raise ProtocolError("the coordinator sent another message instead of a tensor's hash")
        if message.sha256 != digest.digest():
            writer.rewind(start)  # the next call fetches it again
            source = self.hub.repo if self.hub else "the transfer"
            raise CheckpointError(
                f"{source}: the SHA-256 of tensor {tensor.entry.name} differs from the coordinator's. {self._again}"
            )

    @property
    def _again(self) -> str:
        return "Try again" + (", or use mtp-coord serve without --no-share-weights" if self.hub else "")

    def _read(self, infos: list[TensorInfo], skip: int) -> Iterator[bytes]:
        """Yield the bytes of `infos` after the first `skip`, which the coordinator leaves out too."""
        while self.hub is None:
            message = self.pull()
            if message.WhichOneof("body") != "piece" or not message.piece:
                raise ProtocolError(_NO_BYTES)
            yield message.piece
        try:
            yield from self.hub.read_tensors(infos, skip)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {self._again}", public=error.public) from error

    def _next_piece(self, most: int) -> bytes:
        """Return the next bytes, at most `most`. Pieces from a hub may span tensors, those of messages do not."""
        data = self.rest or next(self.pieces)
        self.rest = data[most:]
        if self.rest and self.hub is None:
            raise ProtocolError(_NO_BYTES)
        return data[:most]

    def _send_progress(self) -> None:
        self._reported_at = time.monotonic()
        self.send_reply(pb.WeightsReply(progress=pb.LoadBytes(done=self.done, total=self.total)))

    def _check_stop(self, seconds: float = 0.0) -> None:
        if self.stop.wait(seconds) if seconds else self.stop.is_set():
            raise StoppedError


log = logging.getLogger(__name__)

SILENCE_SECONDS = 60.0
"""Seconds. Maximum wait for the coordinator's next message: it reads or hashes a tensor."""

DRAIN_SECONDS = 10.0
"""Seconds for which a coordinator may still send messages after a refusal."""


async def provide(
    requests: AsyncIterator[pb.Weights], renew_lease: Callable[[pb.Coordinator, int], object]
) -> AsyncGenerator[pb.WeightsReply, None]:
    """Yield the replies of one call, an error as the last. `renew_lease` leases this worker, or raises BusyError."""
    offer = (await first_message(requests)).offer
    renew_lease(offer.coordinator, offer.lease_ms)
    loop = asyncio.get_running_loop()
    replies: asyncio.Queue[pb.WeightsReply | None] = asyncio.Queue()
    filled: asyncio.Future[int] = loop.create_future()
    filled.add_done_callback(lambda _: replies.put_nowait(None))
    stop = threading.Event()

    def pull() -> pb.Weights:
        coming = asyncio.run_coroutine_threadsafe(_next(requests), loop)
        try:
            return coming.result(SILENCE_SECONDS)
        except CancelledError:
            raise ProtocolError("the coordinator ended the call") from None
        except TimeoutError:
            coming.cancel()
            raise DeadlineError(f"the coordinator sent nothing for {SILENCE_SECONDS:g} s") from None

    def send_reply(reply: pb.WeightsReply) -> None:
        loop.call_soon_threadsafe(replies.put_nowait, reply)

    work = partial(run_into, filled, partial(fill, offer, pull, send_reply, stop))
    # A daemon thread, so that a worker that ends does not wait for a hub.
    threading.Thread(target=work, name="weights", daemon=True).start()
    try:
        while (reply := await replies.get()) is not None:
            yield reply
        log.info("weights received", extra={"received": format_size(await filled)})
        yield pb.WeightsReply(kept=pb.WeightsKept())
    except ClusterError as error:
        log.warning("weights refused", extra={"error": str(error)})
        yield _refusal(error)
        # Wait until the coordinator has read the reply. A call that ends during its writes loses the reply.
        with suppress(TimeoutError, ClusterError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while True:
                    await _next(requests)
    finally:
        stop.set()


def _refusal(error: ClusterError) -> pb.WeightsReply:
    status = to_status(error)
    refused = pb.WeightsRefused(code=status.code, details=status.details)
    for key, value in status.metadata:
        refused.metadata[key] = value.encode() if isinstance(value, str) else value
    return pb.WeightsReply(refused=refused)


async def _next(requests: AsyncIterator[pb.Weights]) -> pb.Weights:
    try:
        return await anext(requests)
    except StopAsyncIteration:
        raise ProtocolError("the coordinator ended the call early") from None
