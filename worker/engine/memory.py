"""MLX's memory limits, its cache of freed buffers, and wired memory. Everything here runs on the engine thread."""

from __future__ import annotations

import ctypes
import gc
import logging

import mlx.core as mx
import psutil

from mtp.kernels.cuda import backend
from proto.frame import Frame

log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 2 * 10**9
"""Bytes. Largest cache of freed buffers. A step reuses far less, and the rest would only displace other programs."""

CACHE_SHARE = 0.05
"""Largest cache of freed buffers as a share of the memory limit, for machines on which 2 GB is much."""

FRAMES_BETWEEN_CLEARS = 256
"""Frames. K/V caches grow every 256 tokens, and the buffers they leave behind never fit a later request."""

SMALL_MACHINE_BYTES = 16 * 2**30
"""Bytes. Up to this size a machine does not wire weights: reports name freezes of Macs with 16 GB."""


def set_limits(memory_limit: int) -> None:
    """Hold MLX to `memory_limit` bytes, with a small cache of freed buffers within it."""
    mx.set_memory_limit(memory_limit)
    cache_limit = int(min(MAX_CACHE_BYTES, CACHE_SHARE * memory_limit))
    before = mx.set_cache_limit(cache_limit)
    if before < cache_limit:  # the CPU backend's own limit is 32 MB
        mx.set_cache_limit(before)


def wires_by_default() -> bool:
    """Return whether weights are wired here: with Metal, on a machine of more than 16 GB."""
    return backend() == "metal" and psutil.virtual_memory().total > SMALL_MACHINE_BYTES


def wire_weights(*, wanted: bool = True) -> int:
    """Wire the memory in use, which is that of the weights just loaded. Return the wired limit in bytes, 0 for none.

    Without it macOS pages out weights that are idle for a second, and the next step waits for them. The limit covers
    the weights alone: MLX then never wires K/V and activations, whose churn was reported to crash the system. Call it
    once after a load, with no work in flight. `wanted` False does nothing.
    """
    if not (wanted and wires_by_default()):
        return 0
    mx.synchronize()
    gc.collect()
    mx.clear_cache()
    recommended = mx.device_info().get("max_recommended_working_set_size")
    weights = mx.get_active_memory()
    limit = min(weights, recommended) if isinstance(recommended, int) else weights
    try:
        mx.set_wired_limit(limit)
    except (ValueError, RuntimeError) as error:  # macOS 14, or a limit set with sysctl
        log.warning("weights are not wired", extra={"error": str(error)})
        return 0
    log.info("weights wired", extra={"bytes": limit})
    return limit


def release_weights() -> None:
    """Unwire memory and return freed buffers to the system. Call it before a load and after an unload."""
    if backend() == "metal":
        mx.synchronize()
        mx.set_wired_limit(0)
    gc.collect()  # an error that ended the last stage may still refer to its weights
    mx.clear_cache()
    trim_allocator()


def trim_allocator() -> None:
    """Return memory that the C library keeps for later allocations to the system. Only glibc needs it.

    A load frees the bytes that it has read and converted, and the stage before it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class CacheTrimmer:
    """Returns freed buffers to the system: after a prompt, every FRAMES_BETWEEN_CLEARS frames, and when idle."""

    def __init__(self) -> None:
        self._frames = 0

    def record_frame(self, frame: Frame) -> None:
        """Count a processed frame, and clear the cache if it ended a prompt or the count is reached."""
        self._frames += 1
        ends_prompt = any(s.sample and not s.open for s in frame.segments)
        if ends_prompt or self._frames >= FRAMES_BETWEEN_CLEARS:
            self._clear()

    def clear_if_idle(self) -> None:
        """Clear the cache if a frame was processed since it was cleared last."""
        if self._frames:
            self._clear()

    def _clear(self) -> None:
        self._frames = 0
        mx.clear_cache()
