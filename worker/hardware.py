"""What this machine is: read once from the system and from MLX."""

from __future__ import annotations

import platform

import mlx.core as mx
import psutil

from proto import cluster_pb2 as pb

DEFAULT_SHARE = 0.75
"""Of the machine's memory, what a worker may use when nobody says otherwise: the system needs the rest."""


def backend() -> str:
    """`metal`, `cuda` or `cpu`: where MLX computes."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


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


def describe(memory_limit: int, dtypes: list[str]) -> pb.Hardware:
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
    )
