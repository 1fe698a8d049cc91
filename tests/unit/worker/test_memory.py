"""Limits, cache and wiring of MLX's memory."""

from __future__ import annotations

import ctypes

import mlx.core as mx
import psutil
import pytest

from mtp.device import DEVICES
from proto.frame import Frame, Segment
from worker.engine import hardware
from worker.engine.hardware import FRAMES_BETWEEN_CLEARS, CacheTrimmer

GB = 10**9

BLOCK_BYTES, BLOCKS = 100_000, 500
"""Blocks below the size from which the C library returns each one at once."""


class FakeMlx:
    """MLX's memory calls as they behave with Metal, recorded in `calls`."""

    def __init__(self, patch: pytest.MonkeyPatch, *, weights: int, recommended: int) -> None:
        self.calls: list[tuple[str, int | None]] = []
        self.wired_error: Exception | None = None
        patch.setattr(hardware, "this_device", lambda: DEVICES["metal"])
        patch.setattr(mx, "get_active_memory", lambda: weights)
        patch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": recommended})
        patch.setattr(mx, "set_wired_limit", self.set_wired_limit)
        patch.setattr(mx, "synchronize", lambda: self.calls.append(("synchronize", None)))
        patch.setattr(mx, "clear_cache", lambda: self.calls.append(("clear", None)))

    def set_wired_limit(self, limit: int) -> int:
        """Record the limit, or raise the error of a system that does not wire."""
        if self.wired_error is not None:
            raise self.wired_error
        self.calls.append(("wire", limit))
        return 0


def use_machine(patch: pytest.MonkeyPatch, total: int) -> None:
    """Let psutil report a machine of `total` bytes."""
    size = psutil.virtual_memory()._replace(total=total)
    patch.setattr(psutil, "virtual_memory", lambda: size)


@pytest.mark.parametrize(("recommended", "limit"), [(24 * GB, 14 * GB), (10 * GB, 10 * GB)])
def test_the_wired_limit_is_the_weights(monkeypatch: pytest.MonkeyPatch, recommended: int, limit: int) -> None:
    """After a load the wired limit equals the weights, within the recommended set, and is set after a clear."""
    fake = FakeMlx(monkeypatch, weights=14 * GB, recommended=recommended)
    use_machine(monkeypatch, 32 * 2**30)
    assert hardware.wire_weights() == limit
    assert fake.calls == [("synchronize", None), ("clear", None), ("wire", limit)]


@pytest.mark.parametrize(("total", "wanted"), [(16 * 2**30, True), (64 * 2**30, False)])
def test_weights_stay_pageable_on_small_machines_and_by_flag(
    monkeypatch: pytest.MonkeyPatch, total: int, wanted: bool
) -> None:
    """A machine of 16 GB, and a worker with --no-wired-memory, never set a wired limit."""
    fake = FakeMlx(monkeypatch, weights=4 * GB, recommended=12 * GB)
    use_machine(monkeypatch, total)
    assert hardware.wire_weights(wanted=wanted) == 0
    assert fake.calls == []


def test_weights_are_unwired_before_they_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wired limit is lowered before the cache is cleared, with no work in flight."""
    fake = FakeMlx(monkeypatch, weights=0, recommended=24 * GB)
    hardware.release_weights()
    assert fake.calls == [("synchronize", None), ("wire", 0), ("clear", None)]


@pytest.mark.parametrize(
    ("limit", "before", "expected"),
    [
        (8 * GB, 40 * GB, [400_000_000]),
        (200 * GB, 40 * GB, [2 * GB]),
        (8 * GB, 2**25, [400_000_000, 2**25]),
    ],
)
def test_the_cache_limit_is_small_and_never_raised(
    monkeypatch: pytest.MonkeyPatch, limit: int, before: int, expected: list[int]
) -> None:
    """MLX gets the promised memory limit and a cache of at most 5 %, 2 GB, or the backend's own limit."""
    memory_limits: list[int] = []
    cache_limits: list[int] = []

    def set_cache_limit(value: int) -> int:
        cache_limits.append(value)
        return before

    monkeypatch.setattr(mx, "set_memory_limit", memory_limits.append)
    monkeypatch.setattr(mx, "set_cache_limit", set_cache_limit)
    hardware.set_limits(limit)
    assert (memory_limits, cache_limits) == ([limit], expected)


@pytest.fixture
def clears(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each clear of MLX's cache."""
    found: list[None] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: found.append(None))
    return found


def frame(segment: Segment) -> Frame:
    """Return a frame with one segment."""
    return Frame(1, 0, (), (segment,))


WINDOW = frame(Segment(0, 1, 4, (5,), open=True, sample=True))
CHUNK = frame(Segment(0, 0, 0, (1, 2)))
LAST_CHUNK = frame(Segment(0, 1, 2, (3, 4), sample=True))


def test_the_cache_is_cleared_after_a_prompt_and_now_and_then(clears: list[None]) -> None:
    """A prompt's last chunk clears the cache, as does every 256th frame; an earlier chunk and a window do not."""
    trimmer = CacheTrimmer()
    for number in range(FRAMES_BETWEEN_CLEARS - 1):
        trimmer.record_frame(CHUNK if number % 2 else WINDOW)
    assert len(clears) == 0
    trimmer.record_frame(WINDOW)
    assert len(clears) == 1
    trimmer.record_frame(LAST_CHUNK)
    assert len(clears) == 2


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc alone keeps it")
def test_freed_memory_returns_to_the_system() -> None:
    """Memory that a load has freed does not stay in the process, even below a block that is in use."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:
        libc.free(block)
    before = psutil.Process().memory_info().rss
    hardware.release_weights()
    assert psutil.Process().memory_info().rss < before - BLOCKS * BLOCK_BYTES // 2
    libc.free(blocks[-1])
