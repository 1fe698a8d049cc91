"""Files of blocks: a damaged header is refused, and an ended write leaves no half of a file."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from proto.errors import ProtocolError
from worker.disk.block_file import SUFFIX, BlockReader, BlockWriter, Piece
from worker.engine.prefix_disk import _whole


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
def test_a_header_that_fits_nothing_is_damage(tmp_path: Path, change: dict[str, Any]) -> None:
    """A reader refuses the block before it reads a byte of its tensors."""
    path = tmp_path / f"block{SUFFIX}"
    writer = BlockWriter(path, 1, 300)
    writer.write_pieces([Piece(0, True, 0, "uint8", (300,), bytes(300))])
    writer.finish_file()
    writer.close()
    BlockReader(path).check([0])
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["0.0.0"] |= change
    changed = json.dumps(header).encode().ljust(length)
    path.write_bytes(data[:8] + changed + data[8 + length :])
    with pytest.raises(ProtocolError, match="damaged"):
        BlockReader(path)


def test_a_block_that_cannot_be_opened_is_not_damaged(tmp_path: Path) -> None:
    """A damaged block is removed. One that the system does not open, such as for lack of descriptors, stays."""
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(OSError, match=path.name):
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
