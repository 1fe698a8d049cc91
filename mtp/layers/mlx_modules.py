"""MLX's own CUDA modules for products of quantized weights, compiled by several processes at once.

MLX compiles a module when a product first needs it: one after another, on the thread that evaluates, for up to 53
seconds each on an H200. It keeps the module on disk under a name that follows from the product. So for each module that
a loaded stage needs and the disk lacks, a process evaluates a small product, and this process then finds the file.

MLX 0.32.4 chooses a module by the rows of a product, its format, its sizes and the generation of the GPU. Where another
version chooses otherwise, MLX compiles as before.
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
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mtp.layers.kernel_files import PLACE
from mtp.layers.linear import Format, FusedLinear, InputRows
from proto.state_dir import replace_file

log = logging.getLogger(__name__)

SECONDS = 240.0
"""Seconds. Bound of compiling all modules, after which MLX compiles the rest. On an H200 eight take 54 at once."""

PROCESSES = 8
"""Processes at once, each with a core."""

PROCESS_BYTES = 2**30
"""Bytes of a GPU, and of the machine's memory, that a process may take. CUDA takes some 500 MB of a GPU in each."""

POLL_SECONDS = 0.05

COMMAND = (sys.executable, "-m", "mtp.layers.mlx_modules")

TILES = (16, 32, 64)
"""Rows of a tile. A product of more than 32 rows has tiles of 64. Fewer than 8 rows need no module."""


@dataclass(frozen=True)
class Product:
    """A product that needs one module: its `kernel`, the type and the rows of a tile, and the format of the weights."""

    kernel: str
    dtype: str
    rows: int
    form: Format

    @property
    def module(self) -> str:
        """The name by which MLX looks for the compiled module."""
        form = self.form
        return f"{self.kernel}_{self.dtype}_m{self.rows}_b{form.bits}_g{form.group_size}_{form.mode}"

    def evaluate(self) -> mx.array:
        """Return a small product that needs this module: `[rows, outputs]`."""
        is_transposed, dtype = "_tt_" not in self.kernel, getattr(mx, self.dtype)
        # With no more inputs than a group has, a GPU of generation 9 needs another module.
        inputs = 2 * max(64, self.form.group_size) + (32 if "residue" in self.kernel else 0)
        outputs = 64 if "naive_tn" in self.kernel else 128
        shape = (outputs, inputs) if is_transposed else (inputs, outputs)
        weights = mx.quantize(mx.zeros(shape, dtype), self.form.group_size, self.form.bits, self.form.mode)
        y = self.form.multiply(mx.ones((self.rows, inputs), dtype), weights, transposed=is_transposed)
        mx.eval(y)
        return y


def products_of(form: Format, shape: Sequence[int], dtype: mx.Dtype, generation: int, kind: type) -> Iterator[Product]:
    """Yield the products of rows of `dtype` with packed weights of `shape`, on a GPU of `generation`, such as 9.

    `kind` is the class that multiplies.
    """
    name = str(dtype).removeprefix("mlx.core.")
    if form.bits is None:
        return
    width, tile = shape[-1] * 32 // form.bits, max(64, form.group_size)
    if kind in (InputRows, QuantizedMultiLinear):
        naive = f"qmm_naive_tt_{'residue' if shape[-2] % tile else 'aligned'}"
        yield from (Product(naive, name, rows, form) for rows in TILES)
    if kind is InputRows or width % tile:
        return  # without these sizes MLX has a compiled kernel
    is_fast = generation >= 8 and shape[-2] % 128 == 0 and form.bits in (4, 8) and dtype != mx.float32
    # mlx-lm multiplies each row of an expert by itself, or all in their order.
    tiles = (TILES[0], TILES[-1]) if kind is QuantizedSwitchLinear else TILES
    yield from (Product("qmm_sm80_tn" if is_fast else "qmm_naive_tn_aligned", name, rows, form) for rows in tiles)


def objects_of(root: Any) -> list[Any]:
    """Return the objects that `root` holds, also by others and in closures, so that no layer need know of modules."""
    found, waiting = dict[int, Any](), [root]
    while waiting:
        one = waiting.pop()
        if id(one) in found or issubclass(kind := type(one), (type, ModuleType)):
            continue
        found[id(one)] = one
        # The globals of a function are no part of `root`.
        waiting += (one.__closure__ or ()) if kind is FunctionType else gc.get_referents(one)
    return list(found.values())


def products_in_use(objects: Iterable[Any], dtype: mx.Dtype, generation: int, unembedding: Any = None) -> set[Product]:
    """Return the products by which MLX multiplies rows of `dtype` with the weights among `objects`.

    `unembedding` is an embedding that also multiplies.
    """
    modules = (nn.QuantizedLinear, QuantizedSwitchLinear, QuantizedMultiLinear)
    fused, plain = list[FusedLinear](), list[Any]()
    for one in objects:
        if issubclass(kind := type(one), FusedLinear):
            fused.append(one)
        elif kind in modules or (one is not None and one is unembedding):
            plain.append(one)
    found, taken = set[Product](), set[int]()
    for product in fused:
        taken.add(id(product.weights[0]))
        found.update(products_of(product.format, product.weights[0].shape, dtype, generation, type(product)))
    for module in plain:
        # The weights of others are elsewhere, or have a global scale, which needs other modules.
        if "scales" in module and id(module["weight"]) not in taken and module.get("global_scale") is None:
            form = Format(module.bits, module.group_size, module.mode)
            found.update(products_of(form, module["weight"].shape, dtype, generation, type(module)))
    return found


def compile_missing(folder: Path, products: Iterable[Product], seconds: float = SECONDS) -> None:
    """Let processes compile the modules of `products` that `folder` lacks, and wait for at most `seconds`.

    Modules that do not compile are left to MLX, with one warning for all of them.
    """
    missing = [product for product in products if not (folder / f"{product.module}.ptx").exists()]
    missing.sort(key=lambda product: product.module)
    if not missing:
        return
    memory = psutil.virtual_memory().available
    free = min(memory, int(mx.device_info().get("free_memory", memory)))
    most = max(1, min(PROCESSES, os.cpu_count() or 1, free // PROCESS_BYTES))
    names = " ".join(product.module for product in missing)
    log.info("compiling modules of MLX", extra={"modules": names, "processes": min(most, len(missing))})
    began = time.monotonic()
    try:
        with TemporaryDirectory(prefix="mtp-modules-", ignore_cleanup_errors=True) as parent:
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
    form = Format(**fields.pop("form"))
    product, folder = Product(form=form, **fields), Path(name)
    file = folder / f"{product.module}.ptx"
    with open(folder / f"{product.module}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            product.evaluate()
            store_modules(Path(os.environ[PLACE]), folder)
    if not file.exists():
        sys.exit(f"mlx {version('mlx')} keeps no module of this name")


if __name__ == "__main__":
    main(sys.argv[1])
