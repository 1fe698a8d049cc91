"""What this machine is: read once from the system and from MLX."""

from __future__ import annotations

import math
import os
import platform
import time

import mlx.core as mx
import psutil

from proto import cluster_pb2 as pb

DEFAULT_SHARE = 0.75
"""Of the machine's memory, what a worker may use when nobody says otherwise: the system needs the rest."""


PROBE_ROWS = 4096
"""Of a square fp32 matrix: 64 MB, more than any cache."""

PROBES = 10

DEVICE = "MTP_DEVICE"
"""Environment variable. The value "cpu" makes both programs compute on the CPU, as the tests of this project do."""


def use_requested_device() -> None:
    """Make the CPU MLX's default device if the environment variable MTP_DEVICE says so."""
    if os.environ.get(DEVICE) == "cpu":
        mx.set_default_device(mx.Device(mx.cpu))


def backend() -> str:
    """`metal`, `cuda` or `cpu`: where MLX computes."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def compile_seconds() -> float:
    """What compiling kernels may take amid any work. On CUDA MLX compiles them from source when they are first needed:
    12 s for each on an H200, 58 s in a first frame. Which frame needs one cannot be told: the head's rows, say, follow
    from how many drafts were right. On Metal most come compiled, and the others take a moment."""
    return 120.0 if backend() == "cuda" else 0.0


def default_memory_limit() -> int:
    """Bytes a worker may use: what Metal recommends for the GPU, else a share of the machine's memory."""
    if backend() == "metal":
        recommended = mx.device_info().get("max_recommended_working_set_size")
        if isinstance(recommended, int):
            return recommended
    return int(psutil.virtual_memory().total * DEFAULT_SHARE)


def chip() -> str:
    info = mx.device_info()
    name = info.get("device_name") or info.get("architecture")
    return str(name) if name else platform.processor() or platform.machine()


def measured_bandwidth() -> float:
    """Bytes a second that a matrix-vector product reads: what decoding one token consists of.

    The best of several, rounded to half octaves: equal machines must count as equal, or every start would cut the
    model elsewhere. Takes a tenth of a second; must run on the thread that computes.
    """
    weights = mx.random.uniform(shape=(PROBE_ROWS, PROBE_ROWS))
    vector = mx.random.uniform(shape=(PROBE_ROWS,))
    mx.eval(weights, vector)
    best = math.inf
    for _ in range(PROBES):
        started = time.perf_counter()
        mx.eval(weights @ vector)
        best = min(best, time.perf_counter() - started)
    mx.clear_cache()
    octaves = math.log2(weights.nbytes / best)
    return float(2 ** (round(2 * octaves) / 2))


def describe(memory_limit: int, dtypes: list[str], bytes_per_second: float) -> pb.Hardware:
    """The Hardware message of Describe."""
    return pb.Hardware(
        platform=platform.system().lower(),
        machine=platform.machine(),
        chip=chip(),
        backend=backend(),
        memory_total=psutil.virtual_memory().total,
        memory_limit=memory_limit,
        memory_used=mx.get_active_memory(),
        dtypes=dtypes,
        bytes_per_second=bytes_per_second,
    )


use_requested_device()  # at import, so that it precedes every use of MLX by an engine
