"""The transfer of backups of sequences between the engine of a worker and the coordinator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

from proto import cluster_pb2 as pb
from proto.backup import PieceJoiner, split
from proto.errors import NotReadyError, ProtocolError, StaleEpochError
from worker.engine.backup import ReceivedBackup, layer_states
from worker.engine.stage_engine import StageEngine
from worker.node.node import WorkerNode


async def read_backup(
    node: WorkerNode, request: pb.BackupRequest
) -> AsyncGenerator[pb.BackupPiece]:
    """Yield the newest backup of a sequence, its head first. Raises NotReadyError if there is none."""
    engine = _engine(node, request.coordinator, request.epoch)
    backup = engine.backups.made.pop(request.seq_id, None)
    if backup is None:
        raise NotReadyError(f"sequence {request.seq_id} has no backup here")
    states = await node.machinery.thread.call(partial(layer_states, backup, 0))
    # The coordinator measures the transfer from the head on, so the head follows the first wait for the engine.
    yield pb.BackupPiece(head=pb.BackupHead(seq_id=backup.seq_id, length=backup.length))
    index = 0
    while states:
        for piece in split(states):
            yield piece
        index += len(states)
        # Between two calls the engine thread may run frames.
        states = await node.machinery.thread.call(partial(layer_states, backup, index))


async def write_backup(node: WorkerNode, pieces: AsyncIterator[pb.BackupPiece]) -> None:
    """Give the engine the backup in `pieces`. Raises ProtocolError for one that exceeds the budget of the stage."""
    first = await anext(pieces, None)
    if first is None or not first.HasField("head"):
        raise ProtocolError("the first piece of a backup is not its head")
    head = first.head
    engine = _engine(node, head.coordinator, head.epoch)
    joiner = PieceJoiner(node.identity.memory_limit)
    async for piece in pieces:
        joiner.add_piece(piece)
    layers: dict[int, list[bytes]] = {}
    for state in joiner.states:
        layers.setdefault(state.layer, []).append(state.data)
    if len(head.tokens) != head.length:
        raise ProtocolError(f"a backup of {head.length} tokens has {len(head.tokens)} of them")
    received = ReceivedBackup(tuple(head.tokens), layers)
    await node.machinery.thread.call(partial(engine.receive_backup, head.seq_id, received))


def _engine(node: WorkerNode, coordinator: pb.Coordinator, epoch: int) -> StageEngine:
    """Return the engine of plan `epoch`. Raises BusyError for another coordinator, StaleEpochError for another plan."""
    node.renew_lease(coordinator)
    binding = node.binding
    if binding is None or binding.place.epoch != epoch or binding.engine is None:
        raise StaleEpochError(f"no plan of epoch {epoch} is bound here")
    return binding.engine
