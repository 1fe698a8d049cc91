"""The binding of a stage into one plan: its engine, its link to the next stage and its results."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from proto import cluster_pb2 as pb
from proto.errors import AccessError, ClusterError, NotReadyError, ProtocolError, StaleEpochError
from proto.frame import Frame, decode, encode, encode_head
from proto.frame_stamps import FrameStamps, StageStep
from proto.rpc.data_connection import HopFigures, StreamBinding
from proto.rpc.link import FrameWriter, Link, OnFrame
from proto.rpc.listener import BackgroundTasks
from proto.trust.certificates import NodeIdentity, Role
from proto.trust.node_trust import NodeTrust
from worker.engine.frame_engine import FrameEngine
from worker.engine.host import EngineHost
from worker.engine.stage_state import relayed_tokens

log = logging.getLogger(__name__)

LOST_PEER = "connection to a peer"
"""Part of the message of a collective of MLX whose other member is lost."""

MAX_QUEUED_FRAMES = 256
MAX_QUEUED_BYTES = 2**30
"""Bound the frames that wait for the engine. A sender that limits its frames in flight stays far below."""


@dataclass
class Tally:
    """A count of messages and of their bytes. Any thread may count."""

    messages: int = 0
    nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, nbytes: int) -> None:
        """Count a message of `nbytes` bytes."""
        with self._lock:
            self.messages += 1
            self.nbytes += nbytes


@dataclass
class Traffic:
    """Counters of the data plane, which start at 0 with the process."""

    received: Tally = field(default_factory=Tally)
    sent: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class Place:
    """A stage's place in a plan.

    `previous_node` is the node id of the previous stage of a secured plan, or of the first member of the group. The
    last stage is the previous one of stage 0, to which it relays tokens.
    """

    epoch: int
    stage: int
    num_stages: int
    token: bytes
    previous_node: str = ""
    rank: int = 0
    """The place in a group, whose first member sends the frames to the others."""

    @property
    def last(self) -> bool:
        """True on the last stage."""
        return self.stage == self.num_stages - 1

    def relays(self, stream: StreamBinding) -> bool:
        """Return whether a data stream carries tokens from the last stage: hop `num_stages`, which ends at stage 0."""
        return self.stage == 0 and self.rank == 0 and stream.stage == self.num_stages > 1


class Binding:
    """One stage in one plan, made on the event loop. `on_failure` is called when it fails before the plan ends."""

    def __init__(
        self,
        place: Place,
        host: EngineHost,
        traffic: Traffic,
        on_failure: Callable[[], None],
        trust: NodeTrust | None = None,
    ) -> None:
        self.place = place
        self._trust = trust
        self.thread = host.thread
        self.traffic = traffic
        self._host = host
        self._stamps = host.stamps
        self.engine: FrameEngine | None = None
        self.link: Link | None = None
        self.ring: Link | None = None
        """The link of the last of several stages to the first."""
        self.members: list[Link] = []
        """The links of the first member of a group to the others."""
        self._parked: deque[tuple[int, Frame, FrameStamps]] = deque()
        """Bytes, header and stamps of the frames that wait for tokens, in order. Only the engine thread uses it."""
        self.results: FrameWriter | None = None
        """The connection to the coordinator, on the last stage once the coordinator has opened it."""
        self.ended: asyncio.Queue[ClusterError] = asyncio.Queue()
        """The error that ends the call of the results."""
        self.fault: pb.Fault | None = None
        self.hop_timeout = 0.0
        """Seconds. Longest time in which the receiver of a frame must accept it."""
        self.bound = False
        """True while the stage accepts frames."""
        self._received, self._started = Tally(), Tally()
        """Frames received, counted by their reader, and frames started, counted on the engine thread."""
        self._closed = False
        self._on_failure = on_failure

    # ---- start and end

    async def open(self, make_engine: Callable[[], FrameEngine], request: pb.ConnectRequest) -> HopFigures | None:
        """Open the links, make the engine on its thread, and return the figures of the hop, None without one."""
        figures, timeout_ms = None, request.hop_timeout_ms
        self.hop_timeout = timeout_ms / 1000
        if request.HasField("next"):
            self.link = self._make_link(request.next, self.place.stage + 1, timeout_ms)
            figures = await self.link.open()
        for member in request.members:
            self.members.append(self._make_link(member, self.place.stage, timeout_ms))
        await asyncio.gather(*(link.open() for link in self.members))
        await self.thread.call(partial(self._take_engine, make_engine))
        if self._closed:
            raise StaleEpochError(f"plan {self.place.epoch} ended while its stages were connecting")
        self.bound = True
        return figures

    async def open_ring(self, request: pb.RingRequest) -> HopFigures:
        """Open the link of the last stage to the first one, and return the figures of the hop."""
        place = self.place
        if not place.last or place.stage == 0 or self.ring is not None:
            raise ProtocolError(f"stage {place.stage} of {place.num_stages} opens no ring now")
        self.ring = self._make_link(request.first, place.num_stages, request.hop_timeout_ms)
        return await self.ring.open()

    def _make_link(self, peer: pb.Peer, hop: int, timeout_ms: int) -> Link:
        if (self._trust is None) != (peer.node == ""):
            raise AccessError("a plan may not mix workers of a cluster with unsecured workers")
        return Link(
            peer.address,
            StreamBinding(self.place.epoch, hop, self.place.token),
            timeout=timeout_ms / 1000,
            on_failure=lambda error: self._fail(str(error), peer.worker_id),
            trust=self._trust,
            node=peer.node,
        )

    @property
    def awaits_tokens(self) -> bool:
        """True while a frame waits here for tokens of the last stage."""
        return bool(self._parked)

    @property
    def link_stall(self) -> float:
        """Seconds since the oldest write in progress began, to the next stage or to the first; 0 without one."""
        return max((link.stall for link in self._links), default=0.0)

    @property
    def _links(self) -> list[Link]:
        return [link for link in (self.link, self.ring, *self.members) if link is not None]

    def close(self) -> None:
        """End the plan: drop its frames and free the memory of its sequences."""
        self._closed = True
        self.bound = False
        self.thread.submit(self._drop_engine)
        for link in self._links:
            _background.spawn(link.close())
        self.ended.put_nowait(StaleEpochError("this plan has ended"))

    def _fail(self, message: str, peer: str = "") -> None:
        """Record the failure of this stage for the worker status and the end of the results."""
        if self._closed or self.fault is not None:
            return  # the first fault is the cause of others
        log.error("stage failed", extra={"error": message, "epoch": self.place.epoch})
        self.fault = pb.Fault(message=message[:500], peer=peer)
        self.ended.put_nowait(NotReadyError(f"this stage failed: {message}"))
        self._on_failure()

    # ---- frames

    def check_stream(self, stream: StreamBinding) -> None:
        """Raise AccessError or ProtocolError unless the data stream belongs to this stage of this plan."""
        if not secrets.compare_digest(stream.token, self.place.token):
            raise AccessError("the plan token belongs to another plan")
        if stream.stage != self.place.stage and not self.place.relays(stream):
            raise ProtocolError(f"the stream is for stage {stream.stage}, not {self.place.stage}")

    def check_sender(self, sender: NodeIdentity, stream: StreamBinding) -> None:
        """Raise AccessError unless the plan lets `sender` send what `stream` carries."""
        if self.place.stage == 0 and self.place.rank == 0 and not self.place.relays(stream):
            allowed = sender.role is Role.COORDINATOR
        else:
            allowed = sender.role is Role.WORKER and sender.node == self.place.previous_node
        if not allowed:
            raise AccessError("the plan names another sender for the frames of this stage")

    def receiver_of(self, stream: StreamBinding) -> OnFrame:
        """Return the function that takes the messages of a data connection, on the thread that reads them."""
        return self.enqueue_tokens if self.place.relays(stream) else self.enqueue_frame

    def enqueue_frame(self, data: bytes | bytearray) -> None:
        """Queue a frame for the engine. Raises ProtocolError when the queue is full."""
        frames = self._received.messages - self._started.messages
        nbytes = self._received.nbytes - self._started.nbytes
        if frames >= MAX_QUEUED_FRAMES or nbytes + len(data) > MAX_QUEUED_BYTES:
            raise ProtocolError(f"the queue is full: it holds {frames} frames of {nbytes} bytes")
        self._received.count(len(data))
        self.traffic.received.count(len(data))
        stamps = self._stamps.add_frame(self.place.stage, StageStep)
        self.thread.submit_frame(partial(self._process, data, stamps))

    def enqueue_tokens(self, data: bytes | bytearray) -> None:
        """Queue a message of relayed tokens for the engine."""
        received_ns = time.monotonic_ns()
        self.traffic.received.count(len(data))
        self.thread.submit(partial(self._receive_tokens, data, received_ns))

    def apply_signal(self, signal: pb.Signal) -> None:
        """Apply a rollback or a cancellation before all queued frames, on the first member of a group only."""
        if not self.place.rank:  # the other members follow its frames
            self.thread.submit_urgent(partial(self._apply_signal, signal))

    # ---- on the engine thread

    def _take_engine(self, make_engine: Callable[[], FrameEngine]) -> None:
        if not self._closed:
            self.engine, self.thread.on_failure = make_engine(), self._engine_failed
            if self.members:
                self.engine.announce = self._announce

    def _announce(self, frame: Frame) -> None:
        """Send a frame that this member has decided to the others."""
        data = encode_head(frame)
        for link in self.members:
            self._send(link, data, frame.tensor)

    def _drop_engine(self) -> None:
        if self.engine is not None:
            self.engine.end_plan()
        self.engine = None
        self._parked.clear()
        mx.clear_cache()

    def _process(self, data: bytes | bytearray, stamps: FrameStamps) -> None:
        """Process one frame, or park it until its tokens arrive."""
        stamps.mark(StageStep.STARTED)
        if self.engine is None or self._closed:
            self._started.count(len(data))
            return
        try:
            frame = decode(data)
        except ClusterError as error:
            self.thread.run_deferred()
            self._engine_failed(error)
            return
        stamps.mark(StageStep.DECODED)
        stamps.name_frame(frame.epoch, frame.number, frame.rows)
        self._parked.append((len(data), frame, stamps))
        self._run_parked()

    def _receive_tokens(self, data: bytes | bytearray, received_ns: int) -> None:
        """Run the frames that waited for these tokens."""
        if self.engine is None or self._closed:
            return
        try:
            message = decode(data)
            self.engine.receive_tokens(message)
        except ClusterError as error:
            self._engine_failed(error)
            return
        if self._parked:
            *_, waiting = self._parked[0]
            waiting.mark(StageStep.RELAYED)
        self._run_parked()
        if stamps := self._stamps.find_frame(message.epoch, message.number):
            stamps.times[StageStep.TOKENS_RECEIVED] = received_ns

    def _run_parked(self) -> None:
        """Run frames in order, up to the first that lacks tokens."""
        while self._parked and self.engine is not None:
            nbytes, frame, stamps = self._parked[0]
            if self.engine.lacks_tokens(frame):
                self.thread.run_deferred()
                return
            self._parked.popleft()
            self._started.count(nbytes)
            done = partial(self._frame_done, stamps)
            self._host.run_frame(self.engine, frame, stamps, done, self._engine_failed)

    def _frame_done(self, stamps: FrameStamps, out: Frame) -> None:
        """Send a processed frame to the next stage or the coordinator."""
        if self.place.rank:
            return  # the first member of the group sends it
        # The first stage waits for the tokens, and the coordinator does not.
        if self.place.stage and self.place.last and (message := relayed_tokens(out)) is not None:
            data = encode(message)
            stamps.mark(StageStep.TOKENS_ENCODED)
            self._send(self.ring, data)
        data = encode_head(out)
        stamps.mark(StageStep.ENCODED)
        target = self.results if self.place.last else self.link
        self._send(target, data, out.tensor, partial(stamps.mark, StageStep.WRITTEN))

    def _send(
        self,
        target: Link | FrameWriter | None,
        data: bytes,
        tensor: memoryview | bytes = b"",
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        if self._closed:
            return
        if target is None:
            self.thread.post(self._fail, "a receiver of this stage's messages is not connected")
            return
        self.traffic.sent.count(len(data) + len(tensor))
        target.send(data, on_written, tensor)

    def _engine_failed(self, error: Exception) -> None:
        """Drop the engine after an invalid frame, a bug or a lack of memory."""
        if self.engine is not None:
            self.engine.failed = True  # it may have begun a frame
        self.engine, message = None, str(error)
        if not isinstance(error, ClusterError) and LOST_PEER not in message:
            log.error("engine failed", exc_info=error)
            message = f"{type(error).__name__}: {error}"
        self.thread.post(self._fail, message)

    def _apply_signal(self, signal: pb.Signal) -> None:
        if self.engine is None:
            return
        try:
            if signal.HasField("rollback"):
                r = signal.rollback
                self.engine.rollback(signal.epoch, r.seq_id, r.window, r.trim)
            elif signal.HasField("cancel"):
                self.engine.cancel(signal.epoch, signal.cancel.seq_id)
        except ClusterError as error:  # only a frame header may fail a plan
            log.warning("signal ignored", extra={"error": str(error)})
        except Exception as error:
            self._engine_failed(error)


_background = BackgroundTasks()
