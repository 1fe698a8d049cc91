"""The state of the whole machine: free memory, swap, temperature and power, as far as a user without root can read it.

The readings are refreshed in the background, because some of them start a program of the operating system.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import psutil

from mtp.kernels.cuda import backend
from proto import cluster_pb2 as pb

REFRESH_SECONDS = 10.0
"""Seconds between two readings. Temperatures follow the load within about this time."""

PROGRAM_SECONDS = 5.0
"""Seconds. Longest run of one program. All of them answer from memory."""

MAX_CELSIUS = 150.0
"""Degrees. A higher reading is an error of a sensor."""

CHIP_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal")
"""Names of Linux' hwmon devices that measure the processor. Others measure disks, batteries and network cards."""

NVIDIA = (
    "nvidia-smi",
    "--query-gpu=temperature.gpu,power.draw",
    "--format=csv,noheader,nounits",
    "--id=0",
)
"""The command that prints degrees and watts of the first GPU, which MLX uses."""

IOREG = ("ioreg", "-rw0", "-c", "AppleSmartBattery")
"""The command that prints the power of a portable Mac. Desktop Macs print nothing, and have no source without root."""

CommandOutput = Callable[..., str]
"""A function as `command_output`. Tests pass one that returns recorded outputs."""

Readings = tuple[float | None, float | None]
"""A temperature in degrees Celsius and a power in watts."""


@functools.cache
def own_version() -> str:
    """Return the versions of this program and of MLX, such as `0.1.0, mlx 0.31.0`. They are read once."""
    return f"{version('mtp-cluster')}, mlx {version('mlx')}"


def command_output(*command: str) -> str:
    """Return what `command` prints, or an empty string if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


class Sensors:
    """The newest reading of this machine. `latest` has memory at once, and the rest while `refresh` runs."""

    def __init__(self) -> None:
        self.latest = machine_state(None, None)

    async def refresh(self) -> None:
        """Read all sensors every REFRESH_SECONDS until cancelled. A reading that fails changes nothing."""
        while True:
            with contextlib.suppress(OSError):  # no free descriptor for a file of the system
                self.latest = await asyncio.to_thread(read_machine)
            await asyncio.sleep(REFRESH_SECONDS)


def read_machine() -> pb.MachineState:
    """Return the state of this machine. May block for PROGRAM_SECONDS."""
    if sys.platform == "darwin":
        return machine_state(*read_darwin())
    if backend() == "cuda":
        return machine_state(*read_nvidia())
    return machine_state(read_hwmon(), None)


def machine_state(temperature: float | None, power: float | None) -> pb.MachineState:
    """Return the readings as a message, with the memory of the machine. Impossible readings are left out."""
    state = pb.MachineState(
        memory_free=psutil.virtual_memory().available, swap_used=psutil.swap_memory().used
    )
    if temperature is not None and 0 < temperature < MAX_CELSIUS:
        state.temperature = temperature
    if power is not None and power > 0:
        state.power = power
    return state


def read_darwin(output: CommandOutput = command_output) -> Readings:
    """Return the power of a portable Mac. macOS shows temperatures to root alone."""
    found = re.search(r'"SystemLoad"\s*=\s*(\d+)', output(*IOREG))
    return None, int(found[1]) / 1000 if found else None


def read_nvidia(output: CommandOutput = command_output) -> Readings:
    """Return the temperature and the power of the first NVIDIA GPU."""
    fields = output(*NVIDIA).strip().split(",")
    values = [_number(field) for field in fields]
    return (values[0], values[1]) if len(values) == 2 else (None, None)


def read_hwmon() -> float | None:
    """Return the highest temperature of the processor that Linux reports, or None."""
    read = getattr(psutil, "sensors_temperatures", None)  # absent on other systems
    sensors: dict[str, Any] = read() if read else {}
    found = [one.current for name in CHIP_SENSORS for one in sensors.get(name, ())]
    return max(found, default=None)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None
