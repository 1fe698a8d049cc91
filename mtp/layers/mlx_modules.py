"""MLX's own CUDA modules for products of quantized weights, compiled by several processes at once.

MLX compiles a module when a product first needs it: one after another, on the thread that evaluates, for up to 53
seconds each on an H200. It keeps the module on disk under a name that follows from the product. So for each module that
a loaded stage needs and the disk lacks, a process evaluates a small product, and this process then finds the file.

MLX 0.32.4 chooses a module by the rows of a product in tiles of 16, 32 or 64, its format, the alignment of its sizes
and the generation of the GPU. Where another version chooses otherwise, MLX compiles as before.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mtp.layers.kernel_files import PLACE
from mtp.layers.linear import Format, FusedLinear, FusedMLP, InputRows
from proto.state_dir import replace_file

log = logging.getLogger(__name__)

SECONDS = 240.0
"""Seconds. Bound of compiling all modules, after which MLX compiles the rest. On an H200 eight take 54 at once."""

PROCESSES = 8
"""Processes at once, each with a core."""

PROCESS_BYTES = 2**30
"""Bytes of a GPU that a process may take. CUDA takes some 500 MB in each."""

POLL_SECONDS = 0.05

COMMAND = (sys.executable, "-m", "mtp.layers.mlx_modules")

TILES = (16, 32, 64)
"""Rows of a tile. A product of 33 rows or more has tiles of 64. Fewer than 8 rows need no module."""

SORTED = "gather_qmm_rhs_sm80_tn"
"""The kernel of single rows in the order of their experts, which `mlx_lm` computes from 64 pairs on."""


@dataclass(frozen=True, order=True)
class Product:
    """A product that needs one module: its `kernel`, and the rows of a tile. `dtype` is that of the rows, by name."""

    kernel: str
    dtype: str
    rows: int
    bits: int
    group_size: int
    mode: str

    @property
    def module(self) -> str:
        """The name by which MLX looks for the compiled module."""
        return f"{self.kernel}_{self.dtype}_m{self.rows}_b{self.bits}_g{self.group_size}_{self.mode}"

    def evaluate(self) -> mx.array:
        """Return a small product of zeros that needs this module: `[rows, outputs]`, or `[rows, 1, outputs]`."""
        # More inputs than a group has, or a GPU of generation 9 has another module.
        inputs = 2 * max(64, self.group_size) + (32 if "residue" in self.kernel else 0)
        outputs = 128 if "sm80" in self.kernel or "_tt_" in self.kernel else 64
        high, width = (inputs, outputs) if "_tt_" in self.kernel else (outputs, inputs)
        experts, dtype = ((2,) if self.kernel == SORTED else ()), getattr(mx, self.dtype)
        weight = mx.zeros((*experts, high, width * self.bits // 32), mx.uint32)
        affine = self.mode == "affine"
        scales = mx.zeros((*experts, high, width // self.group_size), dtype if affine else mx.uint8)
        weights = weight, scales, scales if affine else None
        form: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        if experts:
            x, chosen = mx.zeros((self.rows, 1, inputs), dtype), mx.zeros(self.rows, mx.uint32)
            y = mx.gather_qmm(x, *weights, rhs_indices=chosen, sorted_indices=True, **form)
        else:
            y = mx.quantized_matmul(mx.zeros((self.rows, inputs), dtype), *weights, transpose=width == inputs, **form)
        mx.eval(y)
        return y


def products_of(
    form: Format, shape: tuple[int, ...], dtype: mx.Dtype, generation: int, *, transposed: bool = True
) -> Iterator[Product]:
    """Yield the products of rows of `dtype` with packed weights of `shape`, on a GPU of `generation`, such as 9.

    Weights not `transposed` have a row for each input.
    """
    assert form.bits is not None
    width, tile = shape[-1] * 32 // form.bits, max(64, form.group_size)
    inputs, outputs = (width, shape[-2]) if transposed else (shape[-2], width)
    if not transposed:
        kernel = f"qmm_naive_tt_{'residue' if inputs % tile else 'aligned'}"
    elif inputs % tile:
        return  # MLX has a compiled kernel
    elif generation >= 8 and outputs % 128 == 0 and form.bits in (4, 8) and dtype != mx.float32:
        kernel = "qmm_sm80_tn"
    else:
        kernel = "qmm_naive_tn_aligned"
    for rows in TILES:
        yield Product(kernel, str(dtype).removeprefix("mlx.core."), rows, form.bits, form.group_size, form.mode)


def products_in_use(dtype: mx.Dtype, generation: int, unembedding: Any = None) -> set[Product]:
    """Return the products of the weights in the memory of this process that MLX multiplies with rows of `dtype`.

    `unembedding` is an embedding that also multiplies.
    """
    found = set[Product]()
    for one in gc.get_objects():
        # Its type decides, because `isinstance` would run code of other libraries' objects.
        kind = type(one)
        if issubclass(kind, FusedLinear | FusedMLP):
            pairs = zip(one.formats, one.weights, strict=True) if kind is FusedMLP else [(one.format, one.weights)]
            for form, weights in pairs:
                if form.bits is not None:
                    shape = weights[0].shape
                    found.update(products_of(form, shape, dtype, generation, transposed=kind is not InputRows))
        elif one is unembedding or issubclass(kind, nn.QuantizedLinear | QuantizedSwitchLinear | QuantizedMultiLinear):
            if "scales" not in one or one.get("global_scale") is not None:
                continue  # its weights are elsewhere, or have another kernel
            form, shape = Format(one.bits, one.group_size, one.mode), one["weight"].shape
            own = set(products_of(form, shape, dtype, generation))
            if kind is QuantizedMultiLinear:
                own.update(products_of(form, shape, dtype, generation, transposed=False))
            if kind is QuantizedSwitchLinear:
                # An expert has one row. The rows in order have a kernel of their own.
                own = {product for product in own if product.rows == TILES[0]}
                first = {p for p in own if p.kernel == "qmm_sm80_tn"}
                own |= {Product(SORTED, p.dtype, TILES[-1], p.bits, p.group_size, p.mode) for p in first}
            found |= own
    return found


def compile_missing(folder: Path, products: Iterable[Product], seconds: float = SECONDS) -> None:
    """Let processes compile the modules of `products` that `folder` lacks, and wait for at most `seconds`.

    Modules that do not compile are left to MLX, with one warning for all of them.
    """
    missing = sorted(product for product in products if not (folder / f"{product.module}.ptx").exists())
    if not missing:
        return
    free = int(mx.device_info().get("free_memory", PROCESSES * PROCESS_BYTES))
    most = max(1, min(PROCESSES, os.cpu_count() or 1, free // PROCESS_BYTES))
    names = " ".join(product.module for product in missing)
    log.info("compiling modules of MLX", extra={"modules": names, "processes": min(most, len(missing))})
    began = time.monotonic()
    with TemporaryDirectory(prefix="mtp-modules-") as parent:
        try:
            problems = _run(missing, folder, Path(parent), most, seconds)
        except OSError as error:
            problems = [str(error)]
    took = round(time.monotonic() - began, 1)
    if problems:
        text = "; ".join(problems)[:500]
        log.warning("modules of MLX not compiled at once", extra={"seconds": took, "problems": text})
    else:
        log.info("modules of MLX compiled", extra={"modules": len(missing), "seconds": took})


def _run(products: Sequence[Product], folder: Path, parent: Path, most: int, seconds: float) -> list[str]:
    """Run a process for each product, at most `most` at once. Return the problems of those that failed."""
    due, waiting, problems = time.monotonic() + seconds, list(products), list[str]()
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while (waiting or running) and time.monotonic() < due:
            while waiting and len(running) < most:
                product = waiting.pop(0)
                running[product.module] = _start(product, folder, parent / product.module, seconds)
            time.sleep(POLL_SECONDS)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if running.pop(name).returncode:
                    lines = (parent / name / "errors").read_text(errors="replace").split("\n")
                    problems.append(f"{name}: {' '.join(lines[-2:])[:200]}")
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return problems + [f"{name}: unfinished after {seconds:g} s" for name in (*running, *(p.module for p in waiting))]


def _start(product: Product, folder: Path, place: Path, seconds: float) -> subprocess.Popen[bytes]:
    """Start a process whose MLX keeps modules in the new folder `place`. It stores them in `folder`."""
    place.mkdir()
    arguments, null = json.dumps([asdict(product), str(folder), math.ceil(seconds)]), subprocess.DEVNULL
    environment = {**os.environ, PLACE: str(place)}
    with open(place / "errors", "wb") as errors:
        process = subprocess.Popen([*COMMAND, arguments], stdin=null, stdout=null, stderr=errors, env=environment)
    # The thread that waits for it may end with this process.
    atexit.register(process.kill)
    return process


def store_modules(place: Path, folder: Path) -> None:
    """Store the modules of `place` in `folder`, each whole or not at all. MLX itself writes them piece by piece."""
    for file in place.glob("*.ptx"):
        # MLX reads the other two only where it finds the first.
        for suffix in (".txt", ".cu", ".ptx"):
            replace_file(folder / f"{file.stem}{suffix}", file.with_suffix(suffix).read_bytes(), 0o600)


def main(arguments: str) -> None:
    """Compile the module of a product, and store it in a folder, unless another process does so first."""
    fields, name, seconds = json.loads(arguments)
    signal.alarm(seconds)  # the process that waits may have been killed
    product, folder = Product(**fields), Path(name)
    file = folder / f"{product.module}.ptx"
    with open(folder / f"{product.module}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            product.evaluate()
            store_modules(Path(os.environ[PLACE]), folder)
    if not file.exists():
        sys.exit(f"MLX {mx.__version__} keeps no module of this name")


if __name__ == "__main__":
    main(sys.argv[1])
