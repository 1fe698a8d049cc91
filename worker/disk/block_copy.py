"""Blocks on their way from the disk of one worker to that of another, which has their layers in a new plan."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from typing import Any

import msgpack

from proto import cluster_pb2 as pb
from proto.backup import KEY_BYTES, LayerState, PieceJoiner, split
from proto.errors import NotReadyError, ProtocolError
from proto.span import Span
from worker.disk.block_file import DTYPES, BlockReader, BlockWriter, LayerTensors, Tensor
from worker.disk.block_index import Block, BlockIndex, block_file


def read_blocks(index: BlockIndex, namespace: str, key: bytes, layers: Span) -> Iterator[pb.BackupPiece]:
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
                link = hashlib.blake2b(b"link" + block.key, digest_size=KEY_BYTES)
                own = block.key if last else link.digest()
                yield pb.BackupPiece(
                    block=pb.BlockHead(
                        namespace=namespace,
                        key=own,
                        layers=pb.Span(start=chain.layers.start, end=chain.layers.end),
                        start=block.start,
                        length=block.length,
                        parent=parent,
                        states=len(sent),
                        nbytes=sum(map(reader.nbytes, sent)),
                    )
                )
                for layer in sent:
                    yield from split([_state(reader.read(layer))])
            parent = own


def _state(layer: LayerTensors) -> LayerState:
    tensors = [(one.dtype, one.shape, one.data) for one in layer.tensors]
    return LayerState(layer.layer, layer.appends, msgpack.packb(tensors))


def receive_blocks(index: BlockIndex, namespace: str) -> Generator[None, pb.BackupPiece]:
    """Receive the pieces of `read_blocks` by `send`, and add each whole block to `index`. `close` drops half of one.

    Raises OSError for a disk that fails, and ProtocolError for malformed pieces.
    """
    joiner = PieceJoiner(index.limit)
    while True:
        head = (yield).block
        block = _block_of(head, namespace)
        if head.nbytes > index.limit:
            raise ProtocolError(f"a block of {head.nbytes} bytes exceeds the disk's {index.limit}")
        writer = BlockWriter(index.folder / block.file, len(block.layers), head.nbytes)
        with writer:
            for _ in range(head.states):
                while not joiner.states:
                    piece = yield
                    if piece.HasField("block"):
                        raise ProtocolError("a block begins before the one before it has ended")
                    joiner.add_piece(piece)
                writer.write_pieces(_layer_of(joiner.states.pop(), block.layers).pieces())
            index.add_block(block, writer.finish_file())


def _block_of(head: pb.BlockHead, namespace: str) -> Block:
    layers = Span(head.layers.start, head.layers.end)
    whole = not head.start and not head.parent
    linked = 0 < head.start < head.length and len(head.parent) == KEY_BYTES
    if head.namespace != namespace or len(head.key) != KEY_BYTES or not (whole or linked):
        raise ProtocolError(f"a block of tokens {head.start} to {head.length} does not fit here")
    file = block_file(namespace, head.key, layers)
    return Block(namespace, head.key, layers, head.start, head.length, head.parent, file)


def _layer_of(state: LayerState, layers: Span) -> LayerTensors:
    try:
        found: list[Any] = msgpack.unpackb(state.data, max_bin_len=len(state.data))
        tensors = [Tensor(dtype, tuple(shape), memoryview(data)) for dtype, shape, data in found]
        if state.layer not in layers or any(one.dtype not in DTYPES for one in tensors):
            raise ValueError("another layer or type")
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"malformed layer {state.layer} of a block: {error}") from error
    return LayerTensors(state.layer, state.appends, tensors)
