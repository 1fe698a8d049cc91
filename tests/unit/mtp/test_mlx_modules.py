"""The choice of MLX's modules that processes compile, and these processes, on the CPU. It keeps no modules on disk."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
import pytest
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mtp.layers import mlx_modules
from mtp.layers.linear import Format, FusedLinear, InputRows
from mtp.layers.mlx_modules import (
    TILES,
    Product,
    compile_missing,
    objects_of,
    products_in_use,
    products_of,
    store_modules,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

AFFINE = Format(4, 64, "affine")
PRODUCT = Product("qmm_sm80_tn", "bfloat16", 16, AFFINE)

STAND_IN = """
import json, sys, time
fields, folder, _ = json.loads(sys.argv[1])
name = f"{fields['kernel']}_{fields['dtype']}_m{fields['rows']}_b4_g64_affine"
MORE
open(f"{folder}/{name}.ptx", "w").close()
"""
"""A program in place of a process that compiles. It stores an empty module."""


def kernels(form: Format, inputs: int, outputs: int, kind: type = FusedLinear, generation: int = 9) -> list[str]:
    """Return the products of rows in bfloat16, as a kernel and the rows of a tile."""
    assert form.bits is not None
    sizes = (inputs, outputs) if kind is InputRows else (outputs, inputs)
    shape = sizes[0], sizes[1] * form.bits // 32
    return [f"{p.kernel} {p.rows}" for p in products_of(form, shape, mx.bfloat16, generation, kind)]


def every_tile(kernel: str) -> list[str]:
    return [f"{kernel} {rows}" for rows in TILES]


def test_the_sizes_and_the_gpu_decide_which_module_a_product_needs() -> None:
    """The rules are those of MLX 0.32.4."""
    assert kernels(AFFINE, 512, 256) == every_tile("qmm_sm80_tn")
    assert kernels(AFFINE, 512, 256, generation=7) == every_tile("qmm_naive_tn_aligned")
    assert kernels(AFFINE, 512, 96) == every_tile("qmm_naive_tn_aligned")
    assert kernels(Format(6, 64, "affine"), 512, 256) == every_tile("qmm_naive_tn_aligned")
    assert kernels(Format(8, 128, "affine"), 192, 256) == []
    assert kernels(Format(4, 32, "mxfp4"), 192, 256) == every_tile("qmm_sm80_tn")
    assert kernels(AFFINE, 192, 512, InputRows) == every_tile("qmm_naive_tt_aligned")
    assert kernels(AFFINE, 96, 512, InputRows) == every_tile("qmm_naive_tt_residue")
    assert kernels(AFFINE, 512, 256, QuantizedSwitchLinear) == ["qmm_sm80_tn 16", "qmm_sm80_tn 64"]
    assert kernels(AFFINE, 512, 96, QuantizedSwitchLinear) == ["qmm_naive_tn_aligned 16", "qmm_naive_tn_aligned 64"]
    both = every_tile("qmm_naive_tt_aligned") + every_tile("qmm_sm80_tn")
    assert kernels(AFFINE, 512, 512, QuantizedMultiLinear) == both
    assert not list(products_of(Format(), (256, 512), mx.bfloat16, 9, FusedLinear))


def test_rows_in_float32_need_the_plain_kernel() -> None:
    found = list(products_of(AFFINE, (256, 64), mx.float32, 9, FusedLinear))
    assert found[0].module == "qmm_naive_tn_aligned_float32_m16_b4_g64_affine"


@pytest.mark.parametrize("form", [AFFINE, Format(6, 128, "affine"), Format(4, 32, "mxfp4"), Format(4, 16, "nvfp4")])
@pytest.mark.parametrize(
    "kernel", ["qmm_sm80_tn", "qmm_naive_tn_aligned", "qmm_naive_tt_aligned", "qmm_naive_tt_residue"]
)
def test_a_product_needs_the_module_that_it_names(kernel: str, form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of the product that `evaluate` computes choose its own kernel, and it can be computed."""
    if kernel == "qmm_sm80_tn" and form.bits == 6:
        pytest.skip("MLX has no such module")
    asked: list[tuple[Any, ...]] = []
    multiply = Format.multiply

    def note_multiply(self: Format, x: mx.array, weights: Any, *, transposed: bool = True) -> mx.array:
        assert x.shape[1] > self.group_size, "a GPU of generation 9 has another module"
        asked.append((x.shape[0], weights[0].shape, FusedLinear if transposed else InputRows))
        return multiply(self, x, weights, transposed=transposed)

    monkeypatch.setattr(Format, "multiply", note_multiply)
    product = Product(kernel, "bfloat16", 64, form)
    y = product.evaluate()
    ((rows, shape, kind),) = asked
    assert rows == 64 and y.shape[-1] == (64 if "naive_tn" in kernel else 128)
    assert product in products_of(form, shape, mx.bfloat16, 9, kind)


def test_only_weights_that_mlx_multiplies_count() -> None:
    """A module that lost its weights to another one counts no more, and an embedding only where it multiplies."""
    linear, experts = nn.QuantizedLinear(256, 128, False), QuantizedSwitchLinear(256, 128, 4, False)
    embedding = nn.QuantizedEmbedding(128, 256, 64, 8)
    objects = [linear, experts, embedding, nn.Linear(8, 8), "text"]
    dense = set(products_of(AFFINE, (128, 32), mx.bfloat16, 9, FusedLinear))
    assert len(dense) == 3
    assert products_in_use(objects, mx.bfloat16, 9) == dense
    fused = FusedLinear.of([experts])
    assert products_in_use([fused, experts], mx.bfloat16, 9) == dense
    del linear["weight"], linear["scales"]
    assert not products_in_use([linear, embedding], mx.bfloat16, 9)
    (first, *_) = products_in_use([embedding], mx.bfloat16, 9, embedding)
    assert first.form == Format(8, 64, "affine")


def test_modules_are_stored_under_their_names(tmp_path: Path) -> None:
    place, folder = tmp_path / "place", tmp_path / "folder"
    place.mkdir()
    folder.mkdir()
    for suffix in ("ptx", "txt", "cu"):
        (place / f"module.{suffix}").write_text(suffix)
    (place / "errors").touch()
    store_modules(place, folder)
    assert {file.name: file.read_text() for file in folder.iterdir()} == {
        f"module.{suffix}": suffix for suffix in ("ptx", "txt", "cu")
    }


def stand_in(monkeypatch: pytest.MonkeyPatch, more: str = "") -> None:
    """Let processes run `STAND_IN`."""
    monkeypatch.setattr(mlx_modules, "COMMAND", (sys.executable, "-S", "-c", STAND_IN.replace("MORE", more)))


def products(count: int) -> list[Product]:
    return [Product("qmm_sm80_tn", "bfloat16", rows, AFFINE) for rows in TILES[:count]]


def test_processes_compile_what_the_folder_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stand_in(monkeypatch)
    (tmp_path / f"{PRODUCT.module}.ptx").touch()
    compile_missing(tmp_path, products(3))
    assert {file.name for file in tmp_path.iterdir()} == {f"{product.module}.ptx" for product in products(3)}
    assert [r.message for r in caplog.records] == ["compiling modules of MLX", "modules of MLX compiled"]
    assert vars(caplog.records[1])["modules"] == 2
    compile_missing(tmp_path, products(3))
    assert len(caplog.records) == 2, "nothing is missing"


def test_processes_that_fail_give_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, "sys.exit('no compiler') if fields['rows'] < 64 else None")
    compile_missing(tmp_path, products(3))
    (record,) = caplog.records
    text = vars(record)["problems"]
    assert record.levelno == logging.WARNING and text.count("no compiler") == 2 and PRODUCT.module in text
    assert len(list(tmp_path.iterdir())) == 1, "the third module is stored"


def test_the_wait_for_processes_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the deadline the processes end, and MLX compiles by itself."""
    stand_in(monkeypatch, "time.sleep(30)")
    monkeypatch.setattr(mlx_modules, "PROCESSES", 1)
    began = time.monotonic()
    compile_missing(tmp_path, products(2), seconds=0.1)
    assert time.monotonic() - began < 10
    (record,) = caplog.records
    assert vars(record)["problems"].count("unfinished after 0.1 s") == 2
    assert not psutil.Process().children()


PARENT = """
import sys, threading
from pathlib import Path
from mtp.layers import mlx_modules
from tests.unit.mtp.test_mlx_modules import products
mlx_modules.COMMAND = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
run = threading.Thread(target=mlx_modules.compile_missing, args=(Path(sys.argv[1]), products(1)), daemon=True)
start = mlx_modules._start
def started(*arguments):
    process = start(*arguments)
    print(process.pid, flush=True)
    return process
mlx_modules._start = started
run.start()
sys.stdin.read()
"""


@pytest.mark.thorough
def test_processes_end_with_the_one_that_waits(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.communicate(timeout=30)
    assert psutil.wait_procs([child], timeout=10)[1] == [], "it has ended"


@pytest.mark.thorough
def test_a_process_computes_its_product(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the CPU MLX keeps no module, which the process reports."""
    compile_missing(tmp_path, [PRODUCT])
    (record,) = caplog.records
    assert "keeps no module of this name" in vars(record)["problems"]


def test_only_the_objects_of_a_stage_count() -> None:
    """A model that was served before may still be in memory. Products in closures count, and each of them once."""
    kept, other = FusedLinear(AFFINE, (mx.zeros((1, 8)),)), FusedLinear(AFFINE, (mx.zeros((1, 8)),))

    def call(x: mx.array) -> mx.array:
        return kept(x)

    holder = {"call": call, "again": [call]}
    found = [one for one in objects_of(holder) if isinstance(one, FusedLinear)]
    assert found == [kept] and other is not kept
