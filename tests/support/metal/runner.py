"""A replacement of `mx.fast.metal_kernel` on a machine without Metal.

MLX writes the Metal source, g++ compiles it with `metal_stdlib.h`, and the CPU runs it. The arrays of a call are
evaluated, so a kernel cannot be part of a compiled function. Not seen are the order of `simd_sum`, contraction to
fused operations, the use of registers, and speed.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.support.metal.address_spaces import check_address_spaces
from tests.support.metal.metal_source import MetalSource

HERE = Path(__file__).parent
BUILT = Path(tempfile.gettempdir()) / "mtp-metal-kernels"
"""Compiled kernels, by the hash of their source. Several test processes share them."""

FEW_ELEMENTS = 8
"""Elements. MLX passes smaller arrays as `constant`, which makes another source."""

GUARD = 64
"""Bytes. Zone around each output in which a write is an error."""

MOST_THREADS = 1024
"""Threads of a threadgroup that Metal allows."""

REAL_KERNEL: Callable[..., Any] = mx.fast.metal_kernel

runs: Counter[str] = Counter()
"""Launches by the name of the kernel."""


class MetalError(RuntimeError):
    """A kernel that would fail on a Mac, or might."""


def reason_not_to_run() -> str | None:
    """Return why this machine cannot run Metal kernels, or None."""
    if platform.machine() != "x86_64":
        return f"fibers are written for x86_64, not for {platform.machine()}"
    return None if shutil.which("g++") else "g++ is not installed"


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
) -> Callable[..., list[mx.array]]:
    """Return what `mx.fast.metal_kernel` returns for these arguments, as a function that runs on the CPU."""
    assert ensure_row_contiguous and not atomic_outputs
    real = REAL_KERNEL(name, list(input_names), list(output_names), source, header)
    sources: dict[Any, MetalSource] = {}

    def call(
        *,
        inputs: Sequence[Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] = (),
    ) -> list[mx.array]:
        """Run the kernel."""
        key = (
            tuple((x.dtype, x.ndim, x.size < FEW_ELEMENTS) if isinstance(x, mx.array) else type(x) for x in inputs),
            tuple(template),
            tuple(output_dtypes),
        )  # fmt: skip
        shapes = [tuple(shape) for shape in output_shapes]
        if key not in sources:
            options = {
                "grid": grid,
                "threadgroup": threadgroup,
                "output_shapes": shapes,
                "output_dtypes": list(output_dtypes),
                "template": list(template),
            }
            sources[key] = MetalSource.generate(real, inputs, options)
        buffers = _inputs(inputs, sources[key])
        outputs = [_Output(shape, dtype) for shape, dtype in zip(shapes, output_dtypes, strict=True)]
        launch(sources[key], [*buffers, *(o.values for o in outputs)], grid, threadgroup)
        runs[name] += 1
        return [output.array() for output in outputs]

    return call


seeds = iter(range(1, 2**62))
"""Seeds of the order in which threads run, another one for each launch, the same ones in every process."""


def launch(
    source: MetalSource,
    buffers: Sequence[np.ndarray],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    seed: int | None = None,
) -> None:
    """Run a kernel over `buffers`. Raises MetalError if its threads wait for each other forever."""
    if np.prod(threadgroup) > MOST_THREADS:
        raise MetalError(f"a threadgroup of {threadgroup} has more than {MOST_THREADS} threads")
    pointers = (ctypes.c_void_p * len(buffers))(*(b.ctypes.data for b in buffers))
    sizes = [(ctypes.c_uint * 3)(*size) for size in (grid, threadgroup)]
    error = _build(source.text)(pointers, *sizes, ctypes.c_uint64(seed or next(seeds)))
    if error:
        raise MetalError(f"{source.instance()}: {error.decode()}")


def _inputs(inputs: Sequence[Any], source: MetalSource) -> list[np.ndarray]:
    """Return the buffers of a kernel's inputs, in order."""
    buffers: list[np.ndarray] = []
    for x, (shape, strides, ndim) in zip(inputs, source.extras, strict=True):
        if not isinstance(x, mx.array):
            buffers.append(np.array(x, np.int32 if isinstance(x, int) else np.float32))
            continue
        plain = mx.contiguous(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
        values = np.ascontiguousarray(np.array(plain))
        buffers.append(values)
        if shape:
            buffers.append(np.array(x.shape, np.int32))
        if strides:
            buffers.append(np.array(values.strides, np.int64) // values.itemsize)
        if ndim:
            buffers.append(np.array(x.ndim, np.int32))
    return buffers


class _Output:
    """An output, NaN before it is written, between two guarded zones."""

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        self._dtype = dtype
        name = "uint16" if dtype == mx.bfloat16 else str(dtype).removeprefix("mlx.core.")
        size = int(np.prod(shape)) * np.dtype(name).itemsize
        self._raw = np.full(size + 2 * GUARD, 0xFF, np.uint8)
        self.values = self._raw[GUARD : GUARD + size].view(name).reshape(shape)

    def array(self) -> mx.array:
        """Return the output. Raises MetalError if the kernel wrote beside it."""
        if not (self._raw[:GUARD] == 0xFF).all() or not (self._raw[-GUARD:] == 0xFF).all():
            raise MetalError("the kernel wrote outside an output")
        found = mx.array(self.values)
        return found.view(mx.bfloat16) if self._dtype == mx.bfloat16 else found


@cache
def _build(text: str) -> Any:
    """Return the function that launches the kernel of a Metal source, after checking its address spaces."""
    source = MetalSource(text, ())
    check_address_spaces(source)
    cpp = source.cpp()
    parts = cpp, (HERE / "metal_stdlib.h").read_text()
    library = BUILT / f"{hashlib.sha256(''.join(parts).encode()).hexdigest()[:20]}.so"
    if not library.exists():
        BUILT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as folder:
            file, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            file.write_text(cpp)
            flags = "-std=c++20 -O2 -ffp-contract=off -fno-strict-aliasing -w -shared -fPIC"
            command = ["g++", *flags.split(), "-I", str(HERE), str(file), "-o", str(made)]
            compiled = subprocess.run(command, capture_output=True, text=True, timeout=100)
            if compiled.returncode:
                raise MetalError(f"{source.instance()}: {compiled.stderr}")
            made.replace(library)
    run = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p
    return run
