"""Compiled kernels of this project on disk, where MLX looks for its own.

MLX compiles a kernel from source anew in each process, and nearly all of the time goes to its own headers, which no
source of this project needs. `KernelFiles` compiles the same source behind `OWN_HEADER`, with MLX's options, to the
same machine code. It writes the result under the name that MLX reads before it compiles. Where another version of MLX
reads another name, MLX finds no file and compiles as before.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from mtp.device import Arithmetic
from proto.state_dir import replace_file

log = logging.getLogger(__name__)

PLACE = "MLX_PTX_CACHE_DIR"
"""The environment variable that names MLX's folder of compiled modules. MLX reads it at its first compilation."""

MOST_BYTES = 2**29
"""Bytes of all modules that a start leaves on disk. A module of this project has 5 to 35 KB."""

MLX_HEADER = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
"""The text that MLX sets before each source."""

OWN_HEADER = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define INFINITY __int_as_float(0x7f800000)
using int8_t = signed char; using int16_t = short; using int32_t = int; using int64_t = long;
using uint8_t = unsigned char; using uint16_t = unsigned short;
using uint32_t = unsigned; using uint64_t = unsigned long;
namespace cooperative_groups {}
namespace mlx::core::cu {
template <typename T> struct Sizes {
  T sizes[10];
  __device__ T operator[](int i) const { return sizes[i]; }
};
using Shape = Sizes<int32_t>;
using Strides = Sizes<int64_t>;
}
"""
"""The text in its place: all of it that the sources use."""

SEED = 0xC70F6907
"""The seed of `std::hash` in the C++ library of Linux."""

LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
"""Versions of NVIDIA's runtime compiler, of which MLX has loaded one."""

TOOLKITS = {"libnvrtc.so.13": "cu13", "libnvrtc.so.12": "cuda_runtime"}
"""The folder of CUDA's headers in the package `nvidia`."""


class CompileError(Exception):
    """A kernel did not compile."""


@dataclass(frozen=True)
class KernelText:
    """The source of one kernel. `text` is what MLX composes after `MLX_HEADER`."""

    name: str
    text: str

    @classmethod
    def compose(
        cls,
        arguments: tuple[str, Sequence[str], Sequence[str], str, str],
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        dtypes: Sequence[mx.Dtype],
    ) -> Self:
        """Return the text for the `arguments` of `mx.fast.cuda_kernel` and those of a call."""
        name, names, outputs, source, header = arguments
        name = "custom_kernel_" + name + "".join(f"_{_value_name(value)}" for _, value in template)
        parameters = []
        for known, array in zip(names, inputs, strict=True):
            parameters.append(f"const {_cuda_type(array.dtype)}* {known}")
            for suffix, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
                if array.ndim and f"{known}_{suffix}" in source:
                    parameters.append(f"const __grid_constant__ {kind} {known}_{suffix}")
        parameters += [f"{_cuda_type(dtype)}* {output}" for output, dtype in zip(outputs, dtypes, strict=True)]
        constants = "".join(f"  {_constant(constant, value)};\n" for constant, value in template)
        signature = f"__global__ void {name}(\n    " + ",\n    ".join(parameters) + ") {\n"
        start = f"{header}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n{signature}"
        body = f"{constants}\n{source}" if template else source
        text = f"{start}{body}\n}}\n\n}} // namespace mlx::core::cu\n"
        return cls(name, text)

    @property
    def module(self) -> str:
        """The name by which MLX looks for the compiled module."""
        return f"{self.name}_{string_hash(MLX_HEADER + self.text):x}"

    @property
    def symbol(self) -> str:
        """The name by which MLX asks the module for the kernel."""
        return f"mlx::core::cu::{self.name}"


def _type_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _cuda_type(dtype: mx.Dtype) -> str:
    name = _type_name(dtype)
    known = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float", "bool": "bool"}
    return known.get(name, f"{name}_t")


def _value_name(value: bool | int | mx.Dtype) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, int):
        return str(value)
    name = _type_name(value)
    return {"float32": "float", "bool": "bool"}.get(name, f"{name}_t")


def _constant(name: str, value: bool | int | mx.Dtype) -> str:
    if isinstance(value, int):
        kind = "bool" if isinstance(value, bool) else "int"
        return f"constexpr {kind} {name} = {str(value).lower()}"
    return f"using {name} = {_cuda_type(value)}"


def string_hash(text: str) -> int:
    """Return `std::hash` of a string in the C++ library of Linux, which MLX uses. Raises OSError."""
    try:
        function = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm
    except AttributeError as error:
        raise OSError(f"libstdc++: {error}") from error
    function.restype = ctypes.c_size_t
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t)
    data = text.encode()
    return int(function(data, len(data), SEED))


class Compiler:
    """NVIDIA's runtime compiler, for a GPU of `architecture`, such as sm_90."""

    def __init__(self, architecture: str) -> None:
        """Find the compiler, which MLX has loaded, and CUDA's headers. Raises OSError."""
        for name in LIBRARIES:
            try:
                self._library = ctypes.CDLL(name)
                break
            except OSError:
                continue
        else:
            raise OSError(f"none of {', '.join(LIBRARIES)} found")
        site = Path(mx.__file__).parent
        homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
        places = [site.parent / "nvidia" / TOOLKITS[name], *(Path(home) for home in homes if home)]
        headers = next((place / "include" for place in places if (place / "include").exists()), None)
        if headers is None:
            raise OSError("CUDA's headers not found")
        folders = [place for place in (site / "include" / "cccl", headers) if place.exists()]
        number = architecture.removeprefix("sm_")
        if not number.isdigit():
            raise OSError(f"unknown architecture {architecture}")
        self.options = [
            "--device-as-default-execution-space",
            f"--gpu-architecture={architecture}{'a' if int(number) >= 90 else ''}",
            *(f"--include-path={folder}" for folder in folders),
        ]
        """MLX's options."""

    @cached_property
    def version(self) -> str:
        """The version of the compiler."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, text: str, symbol: str) -> tuple[bytes, str]:
        """Return the machine code of `text`, and the name in it of the kernel `symbol`. Raises CompileError."""
        program, lowered = ctypes.c_void_p(), ctypes.c_char_p()
        reference, name = ctypes.byref(program), symbol.encode()
        self._call("nvrtcCreateProgram", reference, text.encode(), b"kernel.cu", 0, None, None)
        try:
            self._call("nvrtcAddNameExpression", program, name)
            options = [option.encode() for option in self.options]
            try:
                self._call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
            except CompileError as error:
                raise CompileError(self._read(program, "ProgramLog").decode(errors="replace")[:500]) from error
            self._call("nvrtcGetLoweredName", program, name, ctypes.byref(lowered))
            return self._read(program, "CUBIN"), (lowered.value or b"").decode()
        finally:
            self._call("nvrtcDestroyProgram", reference)

    def _read(self, program: ctypes.c_void_p, item: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{item}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{item}", program, data)
        return data.raw

    def _call(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._library, function)(*arguments):
            raise CompileError(f"{function}: error {code}")


class KernelFiles:
    """The modules on disk that this process uses. Before `open` there are none, and MLX compiles every kernel."""

    def __init__(self) -> None:
        self.compiled: int = 0
        """Modules that this process compiled and stored."""
        self.found: int = 0
        """Modules that it found on disk."""
        self.seconds: float = 0.0
        """Seconds that it compiled for."""
        self.folder: Path | None = None
        self._compiler: Compiler | None = None
        self._opened = 0.0

    def open(self, parent: Path, compiler: Compiler | None = None) -> None:
        """Let MLX keep modules in a folder of `parent`, or of the folder that the user named, and remove the oldest.

        The folder's name has the architecture of the GPU and the version of MLX, which the names of modules lack.
        """
        if self.folder is not None:
            return
        here = Arithmetic.here()
        name = f"mlx-{here.version}-{here.architecture}"
        parent = Path(os.environ.get(PLACE) or parent)
        folder = parent if parent.name == name else parent / name
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._compiler = compiler or Compiler(here.architecture)
            with suppress(FileNotFoundError):  # another process removes the same files
                remove_incomplete(folder)
                remove_oldest(folder.parent, MOST_BYTES)
        except OSError as error:
            log.warning("compiled kernels are not kept", extra={"folder": str(folder), "error": str(error)[:200]})
            return
        # MLX reads the variable once, so no value may replace it later.
        os.environ[PLACE] = str(folder)
        self.folder, self._opened = folder, time.time()

    def provide(self, kernel: KernelText) -> None:
        """Compile `kernel` and store the module unless it is on disk. After an error MLX compiles the kernel."""
        if self.folder is None or self._compiler is None:
            return
        file, text, compiler = self.folder / f"{kernel.module}.ptx", OWN_HEADER + kernel.text, self._compiler
        try:
            key = "\n".join([*compiler.options, compiler.version, text]).encode()
            if is_whole(file, key):
                os.utime(file)
                self.found += 1
                return
            began = time.monotonic()
            code, symbol = compiler.compile(text, kernel.symbol)
            # MLX reads the second file only where it finds the first.
            names = f"{kernel.symbol}\t{symbol}\n{digest_of(key, code)}\n"
            replace_file(file.with_suffix(".txt"), names.encode(), 0o600)
            replace_file(file, code, 0o600)
            self.compiled += 1
            self.seconds += time.monotonic() - began
        except (OSError, CompileError) as error:
            log.warning(
                "compiled kernel not kept, MLX compiles it",
                extra={"kernel": kernel.name, "error": str(error)[:500]},
            )

    def describe(self) -> str:
        """Return the numbers of modules for people."""
        if self.folder is None:
            return "no folder of compiled kernels"
        text = f"{self.compiled} kernels of this project compiled in {self.seconds:.1f} s, {self.found} found on disk"
        return f"{text}, {self._compiled_by_mlx()} compiled by MLX"

    def _compiled_by_mlx(self) -> int:
        """Return the number of modules of MLX that this folder got since `open`."""
        assert self.folder is not None
        return sum(file.stat().st_mtime >= self._opened for file in self.folder.rglob("*.cu"))


def digest_of(key: bytes, code: bytes) -> str:
    """Return the digest of `code` that was compiled from `key`."""
    return hashlib.sha256(hashlib.sha256(key).digest() + code).hexdigest()


def is_whole(file: Path, key: bytes) -> bool:
    """Return whether `file` has the code that was compiled from `key`."""
    try:
        return digest_of(key, file.read_bytes()) in file.with_suffix(".txt").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return False


def remove_incomplete(folder: Path) -> None:
    """Remove the modules of MLX that a killed process did not write to the end. MLX would fail to load them.

    MLX writes the source last.
    """
    for file in folder.rglob("*.ptx"):
        if not file.name.startswith("custom_kernel_") and not file.with_suffix(".cu").exists():
            file.unlink(missing_ok=True)


def remove_oldest(parent: Path, most: int) -> None:
    """Remove the oldest modules of all versions in `parent` until `most` bytes remain."""
    found = []
    for file in parent.glob("mlx-*/**/*.ptx"):
        parts = [part for suffix in (".ptx", ".txt", ".cu") if (part := file.with_suffix(suffix)).exists()]
        # The first one goes first, because MLX reads the other two only with it.
        found.append((file.stat().st_mtime, sum(part.stat().st_size for part in parts), parts))
    total = sum(size for _, size, _ in found)
    for _, size, parts in sorted(found):
        if total <= most:
            return
        for part in parts:
            part.unlink(missing_ok=True)
        total -= size


FILES = KernelFiles()
"""The files of this process, since MLX has one folder for all of it."""
