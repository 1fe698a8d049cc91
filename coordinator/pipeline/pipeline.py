"""The seam between the generation loop and the carrier of its frames: stages in this process, or workers.

It also finds the longest prefix that the disks of all stages have, and the blocks to move for a longer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from coordinator.planning.capacity import Capacity
from coordinator.status.frame_trace import ProcessTrace
from mtp.device import FrameLimits
from proto import cluster_pb2 as pb
from proto.backup import LayerState, ReceivedStates
from proto.control import Rollback
from proto.errors import ClusterError
from proto.frame import Frame
from proto.frame_stamps import StampRing
from proto.span import Span


@dataclass(frozen=True)
class Move:
    """The blocks of `layers` on the disk of worker number `source`, which number `target` lacks."""

    source: int
    target: int
    layers: Span


@dataclass(frozen=True)
class FoundPrefix:
    """Every stage has the first `tokens` tokens of a prompt on disk, and after all `moves` the first `most`.

    `share` is the number of layers to move over those of the longest stage.
    """

    tokens: int = 0
    most: int = 0
    moves: tuple[Move, ...] = ()
    share: float = 0.0


def longest_prefix(disks: Sequence[pb.PrefixReply]) -> FoundPrefix:
    """Return the longest prefixes with and without moves between `disks`, the answers of all workers."""
    most = FoundPrefix()
    for length in sorted({one.length for disk in disks for one in disk.held}, reverse=True):
        moves = _moves(disks, length)
        if moves is None:
            continue
        if not moves:
            return FoundPrefix(length, most.most or length, most.moves, most.share)
        if not most.moves:
            moved = sum(len(move.layers) for move in moves)
            share = moved / max(len(disk.layers) for disk in disks)
            most = FoundPrefix(0, length, tuple(moves), share)
    return most


def _moves(disks: Sequence[pb.PrefixReply], length: int) -> list[Move] | None:
    """Return the moves after which each stage has `length` tokens, or None if some layer is on no disk."""
    held = [{n for one in disk.held if one.length == length for n in one.layers} for disk in disks]
    moves: list[Move] = []
    for target, disk in enumerate(disks):
        missing = set(disk.layers) - held[target]
        for source, other in enumerate(disks):
            # Disks of another namespace have other bits.
            found = missing & held[source] if other.namespace == disk.namespace else set[int]()
            moves += (Move(source, target, span) for span in _spans(found))
            missing -= found
        if missing:
            return None
    return moves


def _spans(layers: Iterable[int]) -> Iterator[Span]:
    """Yield the spans that `layers` form together."""
    for _, run in groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0]):
        numbers = [layer for _, layer in run]
        yield Span(numbers[0], numbers[-1] + 1)


class Pipeline(Protocol):
    """A plan that serves. It takes frames in order and returns them in the same order with outcomes.

    `send_frame` and the broadcasts return at once. The scheduler bounds the frames in flight. Stages of this process
    need neither the broadcasts, since a header comes as soon, nor copies of blocks, nor the status of workers.
    """

    epoch: int
    stages: int
    capacity: Capacity
    suspect: str | None
    """After a failure, the address of the worker to exclude if all workers turn out to be alive."""
    makes_backups: bool
    """True if the coordinator may outlive the stages, so that backups of sequences are useful."""
    frame_limits: FrameLimits
    """The frames that suit the machines of all stages."""
    stamps: StampRing
    """The coordinator's stamps of the newest frames."""

    @property
    def has_disk(self) -> bool:
        """True if all stages keep prefixes on disk."""

    def send_frame(self, frame: Frame) -> None:
        """Queue a frame for stage 0. `receive_frame` raises the error if sending fails."""

    async def receive_frame(self) -> Frame:
        """Return the next frame from the last stage. Once the plan has failed, every call raises its error."""

    def broadcast_rollback(self, rollback: Rollback) -> None:
        """Send a rollback to every stage at once."""
        return

    def broadcast_cancel(self, seq_id: int) -> None:
        """Tell every stage at once that a sequence has no client any more."""
        return

    async def read_backup(self, seq_id: int, limit: int) -> ReceivedStates:
        """Return the newest backup of a sequence, of at most `limit` bytes, after the frame of its BackUp.

        Raises ClusterError if a stage fails, or if the stages have different backups.
        """

    async def write_backup(self, seq_id: int, tokens: Sequence[int], states: Sequence[LayerState]) -> None:
        """Give every stage its part of a backup, for the operation RestoreBackup. Raises ClusterError if one fails."""

    async def find_prefix(self, tokens: Sequence[int]) -> FoundPrefix:
        """Return the longest proper prefix of `tokens` on all disks. Raises ClusterError."""

    async def move_blocks(self, tokens: Sequence[int], moves: Sequence[Move]) -> None:
        """Copy blocks of the prefix `tokens` to the disks that lack them. Raises ClusterError."""
        return

    async def load_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Let every stage read the state after `tokens` from its disk, for RestoreBackup. Raises ClusterError."""

    def record_worker_status(self, address: str, worker_status: pb.WorkerStatus) -> None:
        """Use the status of a worker of this plan to detect frames that do not move."""
        return

    async def collect_trace(self, window_ns: int) -> list[ProcessTrace]:
        """Return the traces of the coordinator and of all stages from `window_ns` before the newest frame on."""

    def fail(self, error: ClusterError) -> None:
        """Make `receive_frame` raise `error`, because the plan ends."""

    async def close(self) -> None:
        """Stop using the stages, within seconds."""


class PipelineSource(Protocol):
    """A source of pipelines: the pipeline of the plan in force, and a new one after each failure."""

    async def acquire(self) -> Pipeline:
        """Wait for a plan that serves and return its pipeline. Raises ClusterError after the source's deadline."""

    def report_failure(self, pipeline: Pipeline, error: Exception) -> None:
        """Tell the source that `pipeline` failed with `error`. A source of this process has no machine to exclude."""
        return
