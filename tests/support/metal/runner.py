"""A replacement of `mx.fast.metal_kernel` on a machine without Metal.

MLX writes the Metal source, g++ compiles it with `metal_stdlib.h`, and the CPU runs it. The arrays of a call are
evaluated, so a kernel cannot be part of a compiled function. Not seen are the order of `simd_sum` and of the sums of
matrix products, contraction to fused operations, the use of registers, and speed.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Launch:
    """The resources that one launch of a kernel used.

    Accesses are those of g++ after its optimization, which may be fewer than in the source.
    """

    kernel: str
    threads: int
    """Threads of a threadgroup."""
    shared_bytes: int
    """Bytes of memory that a threadgroup declares."""
    reads: dict[str, int]
    """Bytes read by all threads, by the name of the buffer."""
    distinct_reads: dict[str, int]
    """Bytes in different words that each threadgroup reads, summed over the threadgroups."""


_counted: list[Launch] | None = None


@contextmanager
def count_launches() -> Iterator[list[Launch]]:
    """Count what launches read inside the block, which makes them slower. A read outside a buffer is an error."""
    global _counted
    before, _counted = _counted, []
    try:
        yield _counted
    finally:
        _counted = before


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
        launch(sources[key], [*buffers, *(o.values for o in outputs)], grid, threadgroup, name=name)
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
    name: str = "",
) -> None:
    """Run a kernel over `buffers`. Raises MetalError if its threads wait for each other forever."""
    if np.prod(threadgroup) > MOST_THREADS:
        raise MetalError(f"a threadgroup of {threadgroup} has more than {MOST_THREADS} threads")
    run, count = _build(source.text, counts=_counted is not None), len(buffers)
    pointers = (ctypes.c_void_p * count)(*(b.ctypes.data for b in buffers))
    lengths = (ctypes.c_uint64 * count)(*(b.nbytes for b in buffers))
    sizes = [(ctypes.c_uint * 3)(*size) for size in (grid, threadgroup)]
    used = (ctypes.c_uint64 * (1 + 2 * count))()
    error = run(pointers, lengths, count, *sizes, ctypes.c_uint64(seed or next(seeds)), used)
    if error:
        raise MetalError(f"{source.instance()}: {error.decode()}")
    if _counted is not None:
        names, threads = source.buffers(), int(np.prod(np.minimum(grid, threadgroup)))
        reads, distinct = (dict(zip(names, used[first::2], strict=True)) for first in (1, 2))
        _counted.append(Launch(name, threads, used[0], reads, distinct))


def _inputs(inputs: Sequence[Any], source: MetalSource) -> list[np.ndarray]:
    """Return the buffers of a kernel's inputs, in order."""
    buffers: list[np.ndarray] = []
    for x, (shape, strides, ndim) in zip(inputs, source.extras, strict=True):
        if not isinstance(x, mx.array):
            buffers.append(_guarded(np.array(x, np.int32 if isinstance(x, int) else np.float32)))
            continue
        plain = mx.contiguous(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
        values = _guarded(np.array(plain))
        buffers.append(values)
        if shape:
            buffers.append(_guarded(np.array(x.shape, np.int32)))
        if strides:
            buffers.append(_guarded(np.array(values.strides, np.int64) // values.itemsize))
        if ndim:
            buffers.append(_guarded(np.array(x.ndim, np.int32)))
    return buffers


def _guarded(values: np.ndarray) -> np.ndarray:
    """Return a contiguous copy of `values` between two zones, so that a read beside it is seen in a counted launch."""
    raw = np.full(values.nbytes + 2 * GUARD, 0xFF, np.uint8)
    copy = raw[GUARD : GUARD + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


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
def _build(text: str, *, counts: bool) -> Any:
    """Return the function that launches the kernel of a Metal source, after checking its address spaces."""
    source = MetalSource(text, ())
    check_address_spaces(source)
    cpp = source.cpp()
    # Without the sanitizer's library, whose functions metal_counts.h replaces.
    extra = "-DCOUNT_READS -fsanitize=thread" if counts else ""
    parts = cpp, extra, *(header.read_text() for header in sorted(HERE.glob("*.h")))
    library = BUILT / f"{hashlib.sha256(''.join(parts).encode()).hexdigest()[:20]}.so"
    if not library.exists():
        BUILT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as folder:
            file, unit, made = (Path(folder) / f"kernel.{kind}" for kind in ("cpp", "o", "so"))
            file.write_text(cpp)
            flags = f"-std=c++20 -O2 -ffp-contract=off -fno-strict-aliasing -w -fPIC {extra}"
            for command in (
                ["g++", *flags.split(), "-I", str(HERE), "-c", str(file), "-o", str(unit)],
                ["g++", "-shared", str(unit), "-o", str(made)],
            ):
                compiled = subprocess.run(command, capture_output=True, text=True, timeout=100)
                if compiled.returncode:
                    raise MetalError(f"{source.instance()}: {compiled.stderr}")
            made.replace(library)
    run = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p
    return run
