"""Blocks that a worker copies from another one's disk: the same state, and nothing from half a copy."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import threading
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from proto import cluster_pb2 as pb
from proto.backup import prefix_key
from proto.errors import ClusterError, NotReadyError, ProtocolError
from proto.span import Span
from worker.disk.block_copy import read_blocks, receive_blocks
from worker.disk.block_file import SUFFIX, BlockReader, BlockWriter, LayerTensors, Tensor
from worker.disk.block_index import Block, BlockIndex, block_file
from worker.engine.prefix_disk import _whole

TOKENS = tuple(range(1000))
LENGTHS = (128, 256, 300)
KEYS = {length: prefix_key(TOKENS[:length]) for length in (*LENGTHS, 0)}
APPENDING = {2, 5}
"""Layers with keys and values. The others have one state, whose bytes tell its length."""

LIMIT = 10**9
LAYERS = pb.Span(start=0, end=3)


def tensors_of(layer: int, start: int, length: int) -> LayerTensors:
    """Return the state of a layer."""
    if layer in APPENDING:
        data = bytes((layer + token) % 251 for token in range(start, length))
        return LayerTensors(layer, True, [Tensor("uint8", (length - start,), data)] * 2)
    return LayerTensors(layer, False, [Tensor("float32", (2,), bytes([layer, length % 251]) * 4)])


def write_chain(index: BlockIndex, layers: Span) -> None:
    """Write a chain of blocks, each of which continues the one before."""
    start = 0
    for length in LENGTHS:
        file = block_file("model", KEYS[length], layers)
        with BlockWriter(index.folder / file, len(layers), 0) as writer:
            for layer in layers:
                writer.write_pieces(tensors_of(layer, start, length).pieces())
            size = writer.finish_file()
        parent = KEYS[start] if start else b""
        assert index.add_block(Block("model", KEYS[length], layers, start, length, parent, file), size)
        start = length


@pytest.fixture
def source(tmp_path: Path) -> BlockIndex:
    """Return a disk with two cuts of eight layers."""
    index = BlockIndex(tmp_path / "source", LIMIT)
    for layers in (Span(0, 3), Span(3, 8)):
        write_chain(index, layers)
    return index


@pytest.fixture
def target(tmp_path: Path) -> BlockIndex:
    """Return an empty disk."""
    return BlockIndex(tmp_path / "target", LIMIT)


def copy(pieces: Iterable[pb.BackupPiece], target: BlockIndex, namespace: str = "model") -> None:
    with closing(receive_blocks(target, namespace)) as receiver:
        next(receiver)
        for piece in pieces:
            receiver.send(piece)


def files(index: BlockIndex) -> list[str]:
    return [path.name for path in index.folder.iterdir() if "sqlite" not in path.name]


@pytest.mark.parametrize("layers", [Span(1, 6), Span(2, 3), Span(3, 5), Span(0, 8)])
def test_a_copy_has_the_state_of_the_prefix_alone(source: BlockIndex, target: BlockIndex, layers: Span) -> None:
    """The layers are there after the last token, and not after fewer: their states there were not copied."""
    copy(read_blocks(source, "model", KEYS[300], layers), target)
    assert target.held("model", TOKENS) == {300: set(layers)}
    for chain in target.chains("model", layers, KEYS[300]):
        for layer in chain.layers:
            parts = [BlockReader(target.folder / block.file).read(layer) for block in chain.blocks]
            if layer not in APPENDING:
                assert not any(part.tensors for part in parts[:-1])
                assert parts[-1] == tensors_of(layer, 256, 300)
                continue
            starts = (0, *LENGTHS)
            assert parts == [tensors_of(layer, starts[place], length) for place, length in enumerate(LENGTHS)]
    write_chain(target, layers)  # the worker's own blocks may stand beside a copy
    assert target.held("model", TOKENS) == {length: set(layers) for length in LENGTHS}


@pytest.mark.parametrize("pieces", range(10))
def test_half_a_copy_is_nothing(source: BlockIndex, target: BlockIndex, pieces: int) -> None:
    """A copy that ends early leaves no prefix and no open file."""
    whole = [*read_blocks(source, "model", KEYS[300], Span(1, 3))]
    assert len(whole) == 7, "three heads, a layer of two blocks, and both of the last one"
    copy(whole[:pieces], target)
    expected = {300: {1, 2}} if pieces >= len(whole) else {}
    assert target.held("model", TOKENS) == expected
    assert not [name for name in files(target) if name.endswith(".part")]


def test_a_block_of_other_bits_is_refused(source: BlockIndex, target: BlockIndex) -> None:
    """The namespace of both disks is one."""
    with pytest.raises(ProtocolError, match="does not fit here"):
        copy(read_blocks(source, "model", KEYS[300], Span(0, 3)), target, namespace="other")
    assert files(target) == []


def test_a_damaged_block_is_removed_and_not_sent(source: BlockIndex, target: BlockIndex) -> None:
    """The checksum is that of the writer."""
    path = source.folder / block_file("model", KEYS[300], Span(0, 3))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match="other bytes of 2"):
        copy(read_blocks(source, "model", KEYS[300], Span(0, 8)), target)
    assert not path.exists() and target.held("model", TOKENS) == {}
    with pytest.raises(NotReadyError, match="not on this disk any more"):
        copy(read_blocks(source, "model", KEYS[300], Span(0, 8)), target)


@pytest.mark.parametrize(
    "piece",
    [
        pb.BackupPiece(layer=1, data=b"x", ends=True),
        pb.BackupPiece(block=pb.BlockHead(namespace="model", key=b"short", length=3, layers=LAYERS)),
        pb.BackupPiece(
            block=pb.BlockHead(namespace="model", key=bytes(16), start=3, length=3, parent=bytes(16), layers=LAYERS)
        ),
        pb.BackupPiece(block=pb.BlockHead(namespace="model", key=bytes(16), length=3)),
    ],
)
def test_malformed_pieces_are_refused(target: BlockIndex, piece: pb.BackupPiece) -> None:
    """A layer without a block, and heads that cannot be true."""
    with pytest.raises(ClusterError):
        copy([piece], target)
    assert files(target) == []


def test_a_malformed_layer_is_refused(source: BlockIndex, target: BlockIndex) -> None:
    """Bytes that are no tensors end the copy."""
    head = next(read_blocks(source, "model", KEYS[128], Span(0, 3)))
    for data in (b"", b"\xc1", b"\x91\x93\xa1x\x90\xc4\x00"):
        with pytest.raises(ProtocolError, match="malformed layer 0"):
            copy([head, pb.BackupPiece(layer=0, data=data, ends=True)], target)
    assert files(target) == []


@pytest.mark.parametrize(
    "change",
    [
        {"shape": []},
        {"shape": [-300]},
        {"shape": [2**50], "data_offsets": [0, 2**50]},
        {"data_offsets": [0, float("inf")]},
        {"data_offsets": [300, 0]},
        {"dtype": "F7"},
    ],
    ids=str,
)
def test_a_header_that_fits_nothing_is_damage(source: BlockIndex, change: dict[str, Any]) -> None:
    """A reader refuses the block before it reads a byte of its tensors."""
    path = source.folder / block_file("model", KEYS[300], Span(0, 3))
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["0.0.0"] |= change
    changed = json.dumps(header).encode().ljust(length)
    path.write_bytes(data[:8] + changed + data[8 + length :])
    with pytest.raises(ProtocolError, match="damaged"):
        BlockReader(path)


async def test_a_cancelled_write_ends_before_its_file_is_closed(tmp_path: Path) -> None:
    """A plan that ends may cancel a write on a slow disk. The thread then still uses the file."""
    begun, go_on = threading.Event(), threading.Event()
    writer = BlockWriter(tmp_path / f"slow{SUFFIX}", 1, 0)

    def write() -> None:
        begun.set()
        go_on.wait(10)
        writer.write_pieces([])
        writer.finish_file()

    writing = asyncio.create_task(_whole(write))
    await asyncio.to_thread(begun.wait, 10)
    writing.cancel()
    await asyncio.sleep(0.05)
    assert not writing.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    writer.close()
    assert os.listdir(tmp_path) == [f"slow{SUFFIX}"]


def test_a_writer_that_wrote_nothing_leaves_no_file(tmp_path: Path) -> None:
    BlockWriter(tmp_path / f"never{SUFFIX}", 1, 0).close()
    assert list(tmp_path.iterdir()) == []
