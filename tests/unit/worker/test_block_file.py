"""Files of blocks: a damaged header is refused, and an ended write leaves no half of a file."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from proto.backup import LayerState
from proto.errors import ProtocolError
from worker.disk.block_file import SUFFIX, BlockReader, BlockWriter, Piece
from worker.engine.prefix_disk import _whole


def test_a_block_has_its_states(tmp_path: Path) -> None:
    """A reader gets the bytes of each layer, whatever its pieces, and which layers continue the block before."""
    path = tmp_path / f"block{SUFFIX}"
    writer = BlockWriter(path)
    writer.write_pieces([Piece(3, True, b"12"), Piece(3, True, b""), Piece(3, True, b"345")])
    writer.write_pieces([Piece(5, False, bytes(300))])
    assert writer.finish_file() == path.stat().st_size
    writer.close()
    reader = BlockReader(path)
    assert reader.appends == {3} and [reader.nbytes(n) for n in (3, 4, 5)] == [5, 0, 300]
    assert reader.read([5, 4, 3]) == [LayerState(5, False, bytes(300)), LayerState(3, True, b"12345")]


def test_no_damaged_byte_is_read(tmp_path: Path) -> None:
    """A change of any byte, and any other length, is found before the state is used."""
    path = tmp_path / f"block{SUFFIX}"
    writer = BlockWriter(path)
    writer.write_pieces([Piece(0, True, b"123"), Piece(1, False, b"45")])
    writer.finish_file()
    writer.close()
    data = path.read_bytes()
    changed = [data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :] for n in range(len(data))]
    for wrong in (*changed, *(data[:n] for n in range(len(data))), data + b"0", b"0" + data):
        path.write_bytes(wrong)
        with pytest.raises(ProtocolError, match="damaged"):
            BlockReader(path).read([0, 1])


def test_a_block_that_cannot_be_opened_is_not_damaged(tmp_path: Path) -> None:
    """A damaged block is removed. One that the system does not open, such as for lack of descriptors, stays."""
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(OSError, match=path.name):
            BlockReader(path)


async def test_a_cancelled_write_ends_before_its_file_is_closed(tmp_path: Path) -> None:
    """A plan that ends may cancel a write on a slow disk. The thread then still uses the file."""
    begun, go_on = threading.Event(), threading.Event()
    writer = BlockWriter(tmp_path / f"slow{SUFFIX}")

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
    BlockWriter(tmp_path / f"never{SUFFIX}").close()
    assert list(tmp_path.iterdir()) == []
