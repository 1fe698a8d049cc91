"""The facts that only the engine knows about this machine: chip, device, limits and bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from coordinator.doctor.memory import MemoryLimits
from worker.engine import hardware, sensors


@dataclass(frozen=True)
class MachineFacts:
    """`backend` is metal, cuda or cpu, and `bytes_per_second` the measured speed of matrix-vector products."""

    chip: str
    backend: str
    bytes_per_second: float
    limits: MemoryLimits


def own_version() -> str:
    """Return the versions of the programs here, as workers report theirs."""
    return sensors.own_version()


def measure_machine() -> MachineFacts:
    """Return the facts. Takes a tenth of a second."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    limits = MemoryLimits(
        hardware.default_memory_limit(), recommended if isinstance(recommended, int) else None
    )
    return MachineFacts(hardware.chip(), hardware.backend(), hardware.measured_bandwidth(), limits)
