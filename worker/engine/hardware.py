"""The hardware of this machine, read from the system and from MLX."""

from __future__ import annotations

import functools
import math
import os
import platform
import sys
import time

import mlx.core as mx
import psutil

from mtp.exact.arithmetic import Arithmetic
from mtp.kernels.cuda import backend as backend
from proto import cluster_pb2 as pb

DEFAULT_SHARE = 0.75
"""Default memory limit as a share of the machine's memory. The system needs the rest."""

RECOMMENDED_SHARE = 0.85
"""Default memory limit as a share of the bytes Metal recommends. Other programs use the GPU's memory too."""

PROBE_ROWS = 4096
"""Rows and columns of an fp32 matrix of 64 MB, which exceeds the caches of most chips."""

GPU_MATRICES = 16
"""Matrices of one evaluation on a GPU: 1 GB, which takes 2 ms even at 500 GB/s."""

PROBES = 10

REFRESH = "MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS"
"""Environment variable of MLX, read when its Metal device is created. macOS 26 unwires idle memory after a second."""

DEVICE = "MTP_DEVICE"
"""Environment variable. The value "cpu" makes both programs compute on the CPU, as the tests of this project do."""


def use_requested_device() -> None:
    """Make the CPU MLX's default device if the environment variable MTP_DEVICE says so."""
    if os.environ.get(DEVICE) == "cpu":
        mx.set_default_device(mx.Device(mx.cpu))


def renew_residency() -> None:
    """Ask MLX to renew wired memory twice a second on macOS, unless the environment says otherwise."""
    if sys.platform == "darwin":
        os.environ.setdefault(REFRESH, "500")


def compile_seconds() -> float:
    """Return how long any work may take because it compiles kernels.

    On CUDA MLX compiles kernels from source when they first run: 1 to 12 seconds each on an H200. `warm_up` compiles
    the usual ones while a stage loads, so a frame finds few that are missing. On Metal most come compiled.
    """
    return 30.0 if backend() == "cuda" else 0.0


def default_memory_limit() -> int:
    """Return the bytes a process may use: a share of what Metal recommends, or of the machine's memory."""
    if backend() == "metal":
        recommended = mx.device_info().get("max_recommended_working_set_size")
        if isinstance(recommended, int):
            return int(recommended * RECOMMENDED_SHARE)
    return int(_total_memory() * DEFAULT_SHARE)


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
    """Return the bytes a second that matrix-vector products read, since decoding consists of these.

    A GPU reads GPU_MATRICES different matrices in one evaluation. With one matrix the cost of an evaluation, about
    0.2 ms on Metal, would hide the difference between chips, and a large cache would hold the matrix. The best of
    several probes is rounded to half octaves, so that equal machines count as equal and the cut stays the same over
    restarts. Takes a tenth of a second. Call it on the thread that computes.
    """
    count = 1 if backend() == "cpu" else GPU_MATRICES
    shape = (PROBE_ROWS, PROBE_ROWS)
    matrices = [mx.contiguous(mx.full(shape, 1.0 + i)) for i in range(count)]
    vector = mx.ones((PROBE_ROWS,))
    mx.eval(*matrices, vector)
    best = math.inf
    for _ in range(PROBES):  # the first one also compiles and warms up
        started = time.perf_counter()
        mx.eval([matrix @ vector for matrix in matrices])
        best = min(best, time.perf_counter() - started)
    mx.clear_cache()
    octaves = math.log2(sum(matrix.nbytes for matrix in matrices) / best)
    return float(2 ** (round(2 * octaves) / 2))


def describe(memory_limit: int, bytes_per_second: float) -> pb.Hardware:
    """Return the Hardware message of Describe."""
    return pb.Hardware(
        chip=chip(),
        memory_limit=memory_limit,
        bytes_per_second=bytes_per_second,
        arithmetic=str(Arithmetic.here()),
    )


def memory_used() -> int:
    """Return the bytes that MLX uses."""
    return mx.get_active_memory()


def memory_cached() -> int:
    """Return the bytes of freed buffers that MLX keeps for later use. They are not part of `memory_used`."""
    return mx.get_cache_memory()


# At import, because both must precede the first call that creates MLX's device.
renew_residency()
use_requested_device()
