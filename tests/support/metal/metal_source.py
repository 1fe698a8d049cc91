"""The Metal source that MLX generates for a kernel, and the C++ that runs it on a CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

ATTRIBUTES = {
    "thread_position_in_grid": "f.in_grid",
    "thread_position_in_threadgroup": "f.in_group",
    "thread_index_in_threadgroup": "f.index",
    "thread_index_in_simdgroup": "f.lane",
    "simdgroup_index_in_threadgroup": "f.simdgroup",
    "threads_per_threadgroup": "SIZE",
    "threads_per_grid": "GRID",
    "threads_per_simdgroup": "32",
    "simdgroups_per_threadgroup": "(SIZE.x * SIZE.y * SIZE.z + 31) / 32",
    "threadgroup_position_in_grid": ("uint3{f.in_grid.x / SIZE.x, f.in_grid.y / SIZE.y, f.in_grid.z / SIZE.z}"),
}
"""The attributes of a kernel's parameters, as expressions of a fiber `f`."""

_INSTANCE = re.compile(r'template \[\[host_name\("\w+"\)\]\] \[\[kernel\]\] decltype\((.*?)\) ', re.S)
_KERNEL = re.compile(r"\[\[kernel\]\] void (\w+)\((.*?)\) \{", re.S)
_PARAMETER = re.compile(r"^(?P<type>.*?)(?P<kind>[*&])? *(?P<name>\w+) \[\[(?P<attribute>\w+)", re.S)
SHARED_ARRAY = re.compile(
    r"(?P<aligned>alignas\(\d+\) )?\bthreadgroup\s+(?P<type>\w+)\s+(?P<name>\w+)(?P<size>(?:\[[^\]]*\])+)\s*;"
)


@dataclass(frozen=True)
class MetalSource:
    """The generated text, and which of shape, strides and number of dimensions each input passes as well."""

    text: str
    extras: tuple[tuple[bool, bool, bool], ...]

    @classmethod
    def generate(cls, kernel: Callable[..., Any], inputs: Sequence[Any], options: dict[str, Any]) -> MetalSource:
        """Return what MLX generates for a call of `kernel`, one of the real `mx.fast.metal_kernel`.

        MLX generates it without a GPU while it exports a function.
        """
        found: list[MetalSource] = []

        def call(*arrays: mx.array) -> Any:
            """Call the kernel with `arrays` for the inputs that are arrays."""
            left = iter(arrays)
            given = [next(left) if isinstance(x, mx.array) else x for x in inputs]
            return kernel(inputs=given, **options)

        def record(part: dict[str, Any]) -> None:
            """Keep the text of the only kernel among the parts of the exported graph."""
            if part["type"] == "primitive" and part["name"] == "CustomKernel":
                _, text, *_, extras, _, _, _, _, _ = part["arguments"]
                found.append(cls(text, tuple(tuple(flags) for flags in extras)))

        arrays = [mx.zeros(x.shape, x.dtype) for x in inputs if isinstance(x, mx.array)]
        mx.export_function(record, call, *arrays)
        return found[0]

    @property
    def kernel(self) -> str:
        """The definition of the kernel."""
        return self.text.partition("template [[host_name")[0]

    def parameters(self) -> list[re.Match[str]]:
        """Return the kernel's parameters."""
        head = _KERNEL.search(self.text)
        assert head is not None
        found = [_PARAMETER.match(p.strip()) for p in head[2].split(",\n")]
        return [match for match in found if match is not None]

    def buffers(self) -> list[str]:
        """Return the names of the kernel's buffers, in order."""
        return [found["name"] for found in self.parameters() if found["attribute"] == "buffer"]

    def instance(self) -> str:
        """Return the kernel's name, with the arguments of its template."""
        instance, head = _INSTANCE.search(self.text), _KERNEL.search(self.text)
        assert head is not None
        return instance[1] if instance else head[1]

    def cpp(self) -> str:
        """Return a translation unit with the function `run`, which launches the kernel."""
        arguments, buffers = [], 0
        for found in self.parameters():
            if found["attribute"] != "buffer":
                arguments.append(ATTRIBUTES[found["attribute"]])
                continue
            plain = re.sub(r"\b(device|constant|const)\b", "", found["type"]).strip()
            value = f"({plain}*)BUFFERS[{buffers}]"
            arguments.append(f"*{value}" if found["kind"] == "&" else value)
            buffers += 1
        shared = r"\g<aligned>static \g<type> \g<name>\g<size>; "
        declared = r"gpu::declare_shared(\g<name>, sizeof(\g<name>));"
        body = SHARED_ARRAY.sub(shared + declared, self.kernel)
        body = re.sub(r"\bthreadgroup\b", "", re.sub(r"\[\[[^\]]*\]\]", "", body))
        return f"""#include "metal_stdlib.h"
static void** BUFFERS;
static uint3 GRID, SIZE;
{body}
static void run_thread(const gpu::Fiber& f) {{ {self.instance()}({", ".join(arguments)}); }}
extern "C" const char* run(void** buffers, const uint64_t* lengths, uint count, const uint* grid, const uint* size,
                           uint64_t seed, gpu::Bytes* bytes) {{
  BUFFERS = buffers;
  GRID = {{grid[0], grid[1], grid[2]}};
  SIZE = {{size[0], size[1], size[2]}};
  return gpu::launch(run_thread, GRID, SIZE, seed, buffers, lengths, count, bytes);
}}
"""
