"""Blocks on their way from the disk of one worker to that of another, which has their layers in a new plan."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import msgpack

from proto import cluster_pb2 as pb
from proto.backup import LayerState, PieceJoiner, split
from proto.errors import NotReadyError, ProtocolError
from proto.prefix_key import KEY_BYTES
from proto.span import Span
from worker.disk.block_file import SUFFIX, BlockReader, BlockWriter, LayerTensors, Tensor
from worker.disk.block_index import Block, BlockIndex

TENSORS_PER_LAYER = 8
"""Upper bound, for the room of a header: quantized keys and values have six."""


def block_file(namespace: str, key: bytes, layers: Span) -> str:
    """Return the name of a block's file."""
    return f"{namespace}-{key.hex()}-{layers.start}-{layers.end}{SUFFIX}"


def read_blocks(
    index: BlockIndex, namespace: str, key: bytes, layers: Span
) -> Iterator[pb.BackupPiece]:
    """Yield the blocks that have the state of `layers` after the prefix `key`, each after its head.

    Only the last block of a chain has states that do not append. The ones before get keys that no prefix has, because
    without these states they are no prefixes of their own. Raises NotReadyError, and OSError for a damaged block.
    """
    chains = index.chains(namespace, layers, key)
    if not chains:
        raise NotReadyError(f"layers {layers} of a prefix are not on this disk any more")
    for chain in chains:
        parent = b""
        for block in chain.blocks:
            last = block is chain.blocks[-1]
            with index.removing(block):
                reader = BlockReader(index.folder / block.file)
                sent = [layer for layer in chain.layers if last or layer in reader.appends]
                own = block.key if last else _link_key(block.key)
                yield pb.BackupPiece(
                    block=pb.BlockHead(
                        namespace=namespace,
                        key=own,
                        layers=pb.Span(start=chain.layers.start, end=chain.layers.end),
                        start=block.start,
                        length=block.length,
                        parent=parent,
                        states=len(sent),
                    )
                )
                for layer in sent:
                    yield from split([_state(reader.read(layer))])
            parent = own


def _link_key(key: bytes) -> bytes:
    return hashlib.blake2b(b"link" + key, digest_size=KEY_BYTES).digest()


def _state(layer: LayerTensors) -> LayerState:
    tensors = [(one.dtype, one.shape, one.data) for one in layer.tensors]
    return LayerState(layer.layer, layer.appends, msgpack.packb(tensors))


class BlockReceiver:
    """The blocks from `read_blocks`, added to `index`. Use it as a context, whose end drops an incomplete block."""

    def __init__(self, index: BlockIndex, namespace: str) -> None:
        self._index = index
        self._namespace = namespace
        self._open = ExitStack()
        self._joiner = PieceJoiner(index.limit)
        self._writing: tuple[Block, BlockWriter] | None = None
        self._missing = 0

    def __enter__(self) -> BlockReceiver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def add_piece(self, piece: pb.BackupPiece) -> None:
        """Write the next piece. Raises OSError for a disk that fails, and ProtocolError for malformed pieces."""
        if piece.HasField("block"):
            self._begin(piece.block)
        else:
            self._joiner.add_piece(piece)
            while self._joiner.states:
                self._write(self._joiner.states.pop(0))
        if self._writing is not None and not self._missing:
            block, writer = self._writing
            self._index.add(block, writer.finish())
            self._writing = None
            self._open.close()

    def _begin(self, head: pb.BlockHead) -> None:
        layers = Span(head.layers.start, head.layers.end)
        whole = not head.start and not head.parent
        linked = 0 < head.start < head.length and len(head.parent) == KEY_BYTES
        if head.namespace != self._namespace or len(head.key) != KEY_BYTES or not (whole or linked):
            raise ProtocolError(
                f"a block of tokens {head.start} to {head.length} does not fit here"
            )
        name = block_file(head.namespace, head.key, layers)
        block = Block(head.namespace, head.key, layers, head.start, head.length, head.parent, name)
        writer = BlockWriter(self._index.folder / name, TENSORS_PER_LAYER * len(layers))
        self._writing = block, self._open.enter_context(writer)
        self._missing = head.states

    def _write(self, state: LayerState) -> None:
        if self._writing is None or state.layer not in self._writing[0].layers:
            raise ProtocolError(f"layer {state.layer} is of no block")
        try:
            found: list[Any] = msgpack.unpackb(state.data, max_bin_len=len(state.data))
            tensors = [Tensor(dtype, tuple(shape), data) for dtype, shape, data in found]
            self._writing[1].write(LayerTensors(state.layer, state.appends, tensors))
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"malformed layer {state.layer} of a block: {error}") from error
        self._missing -= 1
