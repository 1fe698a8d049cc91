"""The name of this machine's arithmetic. Machines with equal names give the same bits."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version

import mlx.core as mx

from mtp.kernels.cuda import backend


def generation(architecture: str) -> int | None:
    """Return the generation in an Apple GPU's architecture, such as 15 of `applegpu_g15s`, or None for others."""
    found = re.fullmatch(r"applegpu_g(\d+)[a-z]?", architecture)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Arithmetic:
    """The facts by which MLX chooses kernels: its backend, the architecture of the device, and its version."""

    backend: str
    architecture: str
    version: str

    @classmethod
    def here(cls) -> Arithmetic:
        """Return the arithmetic of MLX's default device."""
        name = backend()
        known = mx.device_info()
        if name == "cpu":
            # The matrix library chooses its kernels by the processor.
            architecture = str(known.get("device_name") or platform.processor() or "")
            architecture = f"{platform.machine()} {architecture}".strip()
        else:
            architecture = str(known.get("architecture") or known.get("device_name") or "unknown")
        return cls(name, architecture, version("mlx"))

    @property
    def generation(self) -> int | None:
        """The generation of an Apple GPU: 13 is M1, 17 is M5."""
        return generation(self.architecture) if self.backend == "metal" else None

    def __str__(self) -> str:
        return f"{self.backend} {self.architecture}, mlx {self.version}"


def unlike_machines(machines: Iterable[tuple[str, str]]) -> str:
    """Return which machines round in the same way, for people, or an empty string if all of them do.

    Each machine is a name and the text of its arithmetic, which is empty if unknown.
    """
    groups: dict[str, list[str]] = {}
    for name, arithmetic in machines:
        groups.setdefault(arithmetic, []).append(name)
    if len(groups) < 2:
        return ""
    return "; ".join(f"{', '.join(names)}: {kind or 'unknown'}" for kind, names in groups.items())
