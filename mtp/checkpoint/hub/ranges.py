"""Reads of many tensors from a hub, with one request for tensors that are adjacent in their file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtp.checkpoint.format.header import TensorInfo
from mtp.checkpoint.hub.repo import HubRepo


def read_tensors(hub: HubRepo, infos: Sequence[TensorInfo], skip: int = 0) -> Iterator[bytes]:
    """Yield the bytes of `infos` after the first `skip`, in pieces that may span tensors."""
    for file, start, end in joined(infos):
        if skip < end - start:
            yield from hub.read_range(file, start + skip, end)
        skip = max(0, skip - (end - start))


def joined(infos: Sequence[TensorInfo]) -> list[tuple[str, int, int]]:
    """Return the byte ranges of `infos` as (file name, start, end), with adjacent ranges joined."""
    runs: list[tuple[str, int, int]] = []
    for info in infos:
        file, start, end = info.file.name, info.start, info.start + info.nbytes
        if runs and runs[-1][0] == file and runs[-1][2] == start:
            start = runs.pop()[1]
        runs.append((file, start, end))
    return runs
