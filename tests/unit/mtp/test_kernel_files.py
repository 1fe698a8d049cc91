"""Compiled CUDA kernels on disk. The compiler is a stand-in: tests/parity/test_cuda_kernels.py runs NVIDIA's."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mtp.layers import kernel_files
from mtp.layers.kernel_files import (
    MLX_HEADER,
    OWN_HEADER,
    PLACE,
    CompileError,
    Compiler,
    KernelFiles,
    KernelText,
    remove_incomplete,
    remove_oldest,
    string_hash,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CUDA runs on Linux")

SOURCE = "  const int K = x_shape[1];\n  y[0] = static_cast<T>(x[K]) + (FAST ? N : scale[0]);"


def kernel(rows: int = 2) -> KernelText:
    inputs = [mx.zeros((rows, 3), mx.float16), mx.array(1.0)]
    template = [("T", mx.bfloat16), ("N", 4), ("FAST", True)]
    arguments = ("tried", ["x", "scale"], ["y", "sums"], SOURCE, "#define TRIED\n")
    return KernelText.compose(arguments, inputs, template, [mx.bfloat16, mx.int32])


class StandIn(Compiler):
    """A compiler that counts its calls."""

    version = "13.0"

    def __init__(self) -> None:
        self.options = ["--gpu-architecture=sm_90a"]
        self.texts: list[str] = []
        self.error: str | None = None

    def compile(self, text: str, symbol: str) -> tuple[bytes, str]:
        if self.error is not None:
            raise CompileError(self.error)
        self.texts.append(text)
        return b"machine code" * 100, "_Z5tried"


@pytest.fixture
def compiler() -> StandIn:
    return StandIn()


@pytest.fixture
def files(tmp_path: Path, compiler: StandIn, monkeypatch: pytest.MonkeyPatch) -> KernelFiles:
    monkeypatch.setenv(PLACE, "")
    found = KernelFiles()
    found.open(tmp_path / "kernels", compiler)
    return found


def module_of(files: KernelFiles) -> Path:
    assert files.folder is not None
    return files.folder / f"{kernel().module}.ptx"


def test_the_hash_is_that_of_the_cpp_library() -> None:
    """MLX names a module by `std::hash` of its source. These values are those of a C++ program."""
    known = {
        "": 0x553E93901E462A6E,
        "a": 0x454DDEE488C1ED6B,
        "kernel source": 0x1BAF0EF7A5E5EC0,
        "0123456789abcdef": 0x934B0D760642ED86,
        "été 12345": 0x61413EA026354301,
    }
    assert {text: string_hash(text) for text in known} == known


def test_the_text_is_the_one_that_mlx_composes() -> None:
    """One different character would be another name, and MLX would compile."""
    assert kernel().name == "custom_kernel_tried_bfloat16_t_4_t"
    assert MLX_HEADER + kernel().text == (
        """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

#define TRIED
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_tried_bfloat16_t_4_t(
    const __half* x,
    const __grid_constant__ Shape x_shape,
    const float* scale,
    __nv_bfloat16* y,
    int32_t* sums) {
  using T = __nv_bfloat16;
  constexpr int N = 4;
  constexpr bool FAST = true;

  const int K = x_shape[1];
  y[0] = static_cast<T>(x[K]) + (FAST ? N : scale[0]);
}

} // namespace mlx::core::cu
"""
    )
    assert kernel().module == kernel(rows=5).module
    plain = KernelText.compose(("plain", ["x"], ["y"], "  y[0] = x[0];", ""), [mx.zeros(2)], [], [mx.float32])
    assert "float* y) {\n  y[0] = x[0];\n}\n" in plain.text


def test_a_stored_module_is_not_compiled_again(files: KernelFiles, compiler: StandIn, tmp_path: Path) -> None:
    """MLX finds the code and the kernel's name in it. A second process with the same compiler stores nothing."""
    files.provide(kernel())
    assert compiler.texts == [OWN_HEADER + kernel().text]
    file = module_of(files)
    assert file.read_bytes() == b"machine code" * 100
    first, digest = file.with_suffix(".txt").read_text().splitlines()
    assert first == "mlx::core::cu::custom_kernel_tried_bfloat16_t_4_t\t_Z5tried" and "\t" not in digest
    assert sorted(file.parent.iterdir()) == [file, file.with_suffix(".txt")]
    assert file.parent.stat().st_mode & 0o777 == 0o700 and os.environ[PLACE] == str(file.parent)
    second = KernelFiles()
    second.open(tmp_path / "elsewhere", compiler)  # the first process started the second one
    second.provide(kernel())
    assert (second.folder, second.compiled, second.found) == (files.folder, 0, 1)


@pytest.mark.parametrize("change", ["truncated", "emptied", "renamed", "compiler"])
def test_a_wrong_module_is_replaced(files: KernelFiles, compiler: StandIn, change: str) -> None:
    """MLX would fail to load it, or load the code of another compiler."""
    files.provide(kernel())
    file = module_of(files)
    if change == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif change == "emptied":
        file.write_bytes(b"")
    elif change == "renamed":
        file.with_suffix(".txt").unlink()
    else:
        compiler.version = "13.1"
    files.provide(kernel())
    assert (files.compiled, files.found, file.read_bytes()) == (2, 0, b"machine code" * 100)
    files.provide(kernel())
    assert files.found == 1


def test_a_kernel_that_does_not_compile_is_left_to_mlx(
    files: KernelFiles, compiler: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    """The call goes on. Its error is that of MLX, if there is one."""
    compiler.error = "identifier y is undefined"
    files.provide(kernel())
    assert list(module_of(files).parent.iterdir()) == []
    assert [vars(record)["error"] for record in caplog.records] == [compiler.error]


def test_without_a_compiler_mlx_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without the library starts as it did."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv(PLACE, "")
    monkeypatch.setattr(kernel_files, "LIBRARIES", ("libabsent.so.1",))
    files = KernelFiles()
    files.open(tmp_path)
    files.provide(kernel())
    assert (files.folder, os.environ[PLACE], files.describe()) == (None, "", "no folder of compiled kernels")
    assert [vars(record)["error"] for record in caplog.records] == ["none of libabsent.so.1 found"]


def test_the_oldest_modules_leave(tmp_path: Path) -> None:
    """The folder stays within its bound, and no other file of the user is removed."""
    for age, name in enumerate(["mlx-1-sm_90/a", "mlx-1-sm_90/long/b", "mlx-2-sm_90/c", "other/d"]):
        for suffix in (".ptx", ".txt", ".cu"):
            file = tmp_path / f"{name}{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"x" * 10)
            os.utime(file, (age, age))
    remove_oldest(tmp_path, 60)
    assert sorted(file.stem for file in tmp_path.rglob("*.*")) == sorted("bbbcccddd")
    remove_oldest(tmp_path, 0)
    assert sorted(file.stem for file in tmp_path.rglob("*.*")) == sorted("ddd")


def test_a_module_that_mlx_did_not_finish_leaves(tmp_path: Path) -> None:
    """MLX writes the source last. It would fail to load a module that a killed process wrote in part."""
    for name in ("qmm_half.ptx", "qmm_whole.ptx", "qmm_whole.cu", "custom_kernel_own.ptx"):
        (tmp_path / name).write_bytes(b"x")
    remove_incomplete(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"qmm_whole.ptx", "qmm_whole.cu", "custom_kernel_own.ptx"}
