"""The hardware of this machine, read from the system and from MLX, and MLX's memory limits."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import math
import os
import platform
import sys
import time
from importlib.metadata import version

import mlx.core as mx
import psutil

from mtp.device import Arithmetic, this_device
from proto.errors import UsageError
from proto.frame import Frame
from proto.terminal.progress import format_size

log = logging.getLogger(__name__)

DEFAULT_SHARE = 0.75
"""Default memory limit as a share of the machine's memory. The system needs the rest."""

RECOMMENDED_SHARE = 0.85
"""Default memory limit as a share of the bytes Metal recommends. Other programs use the GPU's memory too."""

PROBE_ROWS = 4096
"""Rows and columns of an fp32 matrix of 64 MB, which exceeds the caches of most chips."""

PROBES = 10

REFRESH = "MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS"
"""Environment variable of MLX, read when its Metal device is created. macOS 26 unwires idle memory after a second."""

FIRST_WITH_BFLOAT16 = 15
"""Generation of M3 (M1 is 13, M2 is 14). Earlier GPUs emulate bfloat16, so mlx-lm advises float16 on them."""

COMPILERS = ("sh", "g++", "c++", "clang++")
"""Names of the process that MLX starts: the compiler, or the shell around it."""

DEVICE = "MTP_DEVICE"
"""Environment variable. The value "cpu" makes both programs compute on the CPU, as the tests of this project do."""


def use_requested_device() -> None:
    """Make the CPU MLX's default device if the environment variable MTP_DEVICE says so."""
    if os.environ.get(DEVICE) == "cpu":
        mx.set_default_device(mx.Device(mx.cpu))


def default_memory_limit() -> int:
    """Return the bytes a process may use: of what Metal recommends, of an NVIDIA GPU, or of the machine's memory."""
    keys = {"metal": "max_recommended_working_set_size", "cuda": "total_memory"}
    if key := keys.get(this_device().backend):
        recommended = mx.device_info().get(key)
        if isinstance(recommended, int):
            return int(recommended * RECOMMENDED_SHARE)
    return int(_total_memory() * DEFAULT_SHARE)


def checked_memory_limit(given: int | None) -> int:
    """Return `given` bytes, or the default without any. Raises UsageError above the memory of the device."""
    if given is None:
        return default_memory_limit()
    total = _total_memory()
    if this_device().backend == "cuda":
        total = int(mx.device_info().get("total_memory", total))
    if given > total:
        raise UsageError(
            f"--memory-limit {format_size(given)}: this machine has {format_size(total)}. Give less, or leave it out "
            f"for {format_size(default_memory_limit())}"
        )
    return given


@functools.cache
def _total_memory() -> int:
    """Return the memory of this machine. It is read once, because a status must not need a free descriptor."""
    return int(psutil.virtual_memory().total)


def chip() -> str:
    """Return the name of the chip that MLX computes on."""
    info = mx.device_info()
    name = info.get("device_name") or info.get("architecture")
    return str(name) if name else platform.processor() or platform.machine()


def measured_bandwidth() -> float:
    """Return `read_speed` rounded to half octaves, so that equal machines count as equal."""
    return float(2 ** (round(2 * math.log2(read_speed())) / 2))


def read_speed() -> float:
    """Return the bytes a second that matrix-vector products read, since decoding consists of these.

    A GPU reads several matrices at once, or the cost of an evaluation and a large cache would hide the difference
    between chips. The best probe counts. Call it on the thread that computes.
    """
    count = this_device().probe_matrices
    shape = (PROBE_ROWS, PROBE_ROWS)
    matrices = [mx.contiguous(mx.full(shape, 1.0 + i)) for i in range(count)]
    vector = mx.ones((PROBE_ROWS,))
    mx.eval(*matrices, vector)
    best = math.inf
    for _ in range(PROBES):  # the first one also compiles and warms up
        started = time.perf_counter()
        # As the layers compute. `matrix @ vector` takes six times as long on MLX's CPU backend.
        mx.eval([vector @ matrix.T for matrix in matrices])
        best = min(best, time.perf_counter() - started)
    mx.clear_cache()
    return sum(matrix.nbytes for matrix in matrices) / best


def warn_of_emulated_bfloat16(dtype: mx.Dtype) -> None:
    """Log advice if this GPU emulates `dtype`, the type of the activations."""
    own = Arithmetic.here().generation
    if dtype == mx.bfloat16 and own is not None and own < FIRST_WITH_BFLOAT16:
        log.warning("this GPU emulates bfloat16: serve with --dtype float16 for speed, on every machine of the plan")


def compiler_runs() -> bool:
    """Return whether a C++ compiler runs for this process. MLX's CPU backend starts one for each new function."""
    if not this_device().computes_on_host:
        return False
    with contextlib.suppress(psutil.Error):
        return any(child.name() in COMPILERS for child in psutil.Process().children())
    return False


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


def wire_weights(*, wanted: bool = True) -> int:
    """Wire the memory in use, which is that of the weights just loaded. Return the wired limit in bytes, 0 for none.

    Without it macOS pages out weights that are idle for a second. The limit covers the weights alone: MLX then never
    wires K/V and activations, whose churn was reported to crash the system. Call it with no work in flight.
    """
    small = psutil.virtual_memory().total <= SMALL_MACHINE_BYTES
    if not wanted or small or not this_device().wires_memory:
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
    if this_device().wires_memory:
        mx.synchronize()
        mx.set_wired_limit(0)
    gc.collect()  # an error that ended the last stage may still refer to its weights
    mx.clear_cache()
    trim_allocator()


def trim_allocator() -> None:
    """Return memory that glibc keeps for later allocations, such as the bytes that a load has read, to the system."""
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
            self.clear()

    def clear(self) -> None:
        """Clear the cache if a frame was processed since it was cleared last."""
        if self._frames:
            self._frames = 0
            mx.clear_cache()


@functools.cache
def own_version() -> str:
    """Return the versions of this program and of MLX, such as `0.1.0, mlx 0.31.0`. They are read once."""
    return f"{version('mtp-cluster')}, mlx {version('mlx')}"


# At import, because both must precede the first call that creates MLX's device.
if sys.platform == "darwin":
    os.environ.setdefault(REFRESH, "500")  # renews wired memory twice a second
use_requested_device()
