"""The seam between the generation loop and the carrier of its frames: a stage in this process, or workers.

It also finds the longest prefix that the disks of all stages have together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from proto.span import Span, spans_of


@dataclass(frozen=True)
class Move:
    """The state of `layers` on the disk of worker number `source`, which number `target` needs and lacks."""

    source: int
    target: int
    layers: Span


class FoundPrefix(int):
    """The length of the longest prefix that the disks of all stages have together.

    Stages get a part of it from disks of other workers: layers that are `share` times those of the largest stage. Each
    has the first `own` tokens on its own disk.
    """

    own: int = 0
    share: float = 0.0


def longest_prefix(disks: Sequence[pb.PrefixReply]) -> int:
    """Return the length of the longest prefix that each of `disks` has, or 0."""
    found = [set(disk.lengths) for disk in disks]
    return max(set.intersection(*found), default=0) if found else 0


def prefix_with_moves(disks: Sequence[pb.PrefixReply]) -> tuple[FoundPrefix, list[Move]]:
    """Return the longest prefix that `disks` have together, and what has to move. Others have other bits."""
    own = longest_prefix(disks)
    held = [{one.length: {*one.layers} for one in disk.held} for disk in disks]
    for length in sorted({n for one in held for n in one if n > own}, reverse=True):
        moves = list[Move]()
        for target, disk in enumerate(disks):
            missing = {*disk.layers} - held[target].get(length, set())
            for source, other in enumerate(disks):
                given = missing & held[source].get(length, set()) if other.namespace == disk.namespace else set[int]()
                moves += (Move(source, target, span) for span in spans_of(given))
                missing -= given
            if missing:
                break
        else:
            found = FoundPrefix(length)
            moved = sum(len(move.layers) for move in moves)
            found.own, found.share = own, moved / max(len(disk.layers) for disk in disks)
            return found, moves
    found = FoundPrefix(own)
    found.own = own
    return found, []


class Pipeline(Protocol):
    """A plan that serves. It takes frames in order and returns them in the same order with outcomes.

    `send_frame` and the broadcasts return at once. The scheduler bounds the frames in flight. A stage of this process
    needs neither the broadcasts, since a header comes as soon, nor the status of workers.
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

    async def find_prefix(self, tokens: Sequence[int]) -> int:
        """Return the length of the longest proper prefix of `tokens` on all disks, perhaps a FoundPrefix.

        Raises ClusterError.
        """

    async def load_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Let every stage read the state after `tokens` from its disk or others, for RestoreBackup.

        Raises ClusterError.
        """

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
