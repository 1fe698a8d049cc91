"""The device that MLX computes on, and everything that the programs choose by it.

This is the only module that asks MLX for its backend. `worker.model.layer_variants` chooses the variants of layers.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import version

import mlx.core as mx


@dataclass(frozen=True)
class Device:
    """The facts that follow from the backend of MLX, outside the layers."""

    backend: str
    """`metal`, `cuda` or `cpu`."""
    cadence: int
    """Layers, after the first ones, that start computing together. On an H200 a pass over 64 layers takes 10.7 ms with
    1, 10.7 with 4, 11.1 with 8 and 12.8 with 64."""
    ahead_kv_bytes: int
    """Bytes. Largest K/V caches of a frame that begins before the frame before it is finished. Their copy takes 1.3 ms
    per 256 MiB at 400 GB/s, and .1 ms on an H200. On the CPU nothing is gained: the host waits while more than 10
    operations are unfinished."""
    compile_seconds: float
    """Seconds that any work may take because it compiles kernels. On CUDA MLX compiles kernels from source when they
    first run: 1 to 12 seconds each on an H200. On Metal most come compiled."""
    warm_up_batches: tuple[int, ...]
    """Sequences at once in the frames that warm a stage up while it loads. On CUDA they cover every kernel by number of
    rows. On Metal a few frames load the library's kernels and compile what MLX fuses, so the first answer need not."""
    probe_matrices: int
    """Matrices of 64 MB that a probe of the bandwidth reads at once. 16 take 2 ms even at 500 GB/s."""
    exact_probe_rows: int
    """Rows of the largest call that the probe of `--exact` tries. A CPU takes seconds for many, and has no ranges."""
    exact_queries: int | None
    """Rows of one call of MLX's attention with `--exact`, None for any number. Its kernels on GPUs depend on the rows
    and on the keys. With one row the keys alone decide, and a row's keys follow from its position."""

    expert_tile: int = 1
    """Rows of one expert that MLX multiplies together. Its sorted product of single rows finds them itself on Metal and
    CPUs; on CUDA it reads an expert's weights once for each row."""
    masked_keys: int = 0
    """Most keys for which a prompt's sparse attention is one of all keys with a mask. On an H200 2,048 queries take
    9 ms at 30,000 keys and 22 at 62,000, and with gathered keys 110."""
    wires_memory: bool = False
    """MLX wires memory, and the device recommends a limit."""
    token_major_exact: bool = False
    """The attention of `--exact` needs the keys of a token next to each other in memory."""
    stores_columns: bool = False
    """Products of dense weights are fastest where these are fp32 with a row for each input."""
    computes_on_host: bool = False
    """The CPU computes. MLX runs a C++ compiler for functions, multiplies unquantized experts in float32 only, and a
    recurrence of few operations is the fastest."""
    halves_chunks: bool = True
    """The halves of a prompt's chunk overlap in a group. On CUDA each half would unpack the 4-bit weights: for 27B in a
    group of two 62 GB a pass, computed as 15 ms, which all sums of the pass take over NVLink."""


DEVICES = {
    device.backend: device
    for device in (
        Device("cpu", 1, 0, 0.0, (), 1, 9, None, stores_columns=sys.platform == "linux", computes_on_host=True),
        Device("metal", 4, 2**28, 0.0, (1,), 16, 64, 1, wires_memory=True),
        Device("cuda", 4, 2**32, 30.0, (1, 4, 8), 16, 512, 1, 16, 2**18, token_major_exact=True, halves_chunks=False),
    )
}


def this_device() -> Device:
    """Return MLX's default device."""
    if mx.default_device() == mx.Device(mx.cpu):
        return DEVICES["cpu"]
    return DEVICES["metal" if mx.metal.is_available() else "cuda"]


@dataclass(frozen=True)
class Arithmetic:
    """The facts by which MLX chooses kernels. Machines with equal facts give the same bits."""

    backend: str
    architecture: str
    version: str

    @classmethod
    def here(cls) -> Arithmetic:
        """Return the arithmetic of MLX's default device."""
        device, known = this_device(), mx.device_info()
        if device.computes_on_host:
            # The matrix library chooses its kernels by the processor.
            architecture = str(known.get("device_name") or platform.processor() or "")
            architecture = f"{platform.machine()} {architecture}".strip()
        else:
            architecture = str(known.get("architecture") or known.get("device_name") or "unknown")
        return cls(device.backend, architecture, version("mlx"))

    @property
    def generation(self) -> int | None:
        """The generation of an Apple GPU: 13 is M1, 17 is M5. None for other devices."""
        found = re.fullmatch(r"applegpu_g(\d+)[a-z]?", self.architecture)
        return int(found[1]) if found and self.backend == "metal" else None

    def __str__(self) -> str:
        return f"{self.backend} {self.architecture}, mlx {self.version}"


M5 = 17
"""Generation of M5's GPU. Its fused attention for prompts starts at FUSED_ROWS."""

FUSED_ROWS = 1024


@dataclass(frozen=True)
class FrameLimits:
    """The frames that suit a machine, or all machines of a plan.

    `longest` and `shortest` are the tokens of the chunks of long and of short prompts.
    """

    longest: int = 512
    shortest: int = 128

    @classmethod
    def here(cls, *, sparse: bool) -> FrameLimits:
        """Return the limits of this machine for a dense or `sparse` model.

        Fewer than `shortest` rows cost about as much, because a stage reads its weights anyway. 128 tokens of a mixture
        of experts read nearly all of them: on a Mac in as much time as some 350 tokens compute, on an H200 as 1,100.
        """
        here = Arithmetic.here()
        if here.generation is not None and here.generation >= M5:
            return cls(FUSED_ROWS, FUSED_ROWS)
        if sparse and here.backend == "cuda":
            return cls(2048, 1024)
        return cls(shortest=512 if sparse and here.generation else 128)

    @classmethod
    def joint(cls, machines: Collection[FrameLimits]) -> FrameLimits:
        """Return the limits that suit all `machines`. A chunk is too long for none of them."""
        longest = min(one.longest for one in machines)
        shortest = min(longest, max(one.shortest for one in machines))
        return cls(longest, shortest)


def fuses_prompts(rows: int) -> bool:
    """Return whether MLX's attention holds no scores of a prompt chunk of `rows` rows."""
    return rows >= FUSED_ROWS and (Arithmetic.here().generation or 0) >= M5
