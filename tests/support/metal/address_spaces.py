"""A check of the address spaces of a Metal kernel's pointers, which g++ does not know.

Clang's C++ for OpenCL has the same address spaces under other names. One trap that it finds: MLX passes arrays of
fewer than 8 elements as `constant`, so a pointer of type `const device int*` fails for them on a Mac.
"""

from __future__ import annotations

import re

import clang.cindex as clang

from tests.support.metal.metal_source import SHARED_ARRAY, MetalSource

PRELUDE = """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define thread __private
#define METAL_FUNC inline
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef half float16_t;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef float float4 __attribute__((ext_vector_type(4)));
struct bfloat {
  ushort bits;
  bfloat() = default;
  bfloat(float value);
  operator float() const __private;
  operator float() const __global;
  operator float() const __local;
  operator float() const __constant;
  bfloat(const __global bfloat& other);
  __global bfloat& operator=(bfloat other) __global;
  __local bfloat& operator=(bfloat other) __local;
};
typedef bfloat bfloat16_t;
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
float simd_sum(float);
float simd_shuffle_xor(float, ushort);
int simd_shuffle_xor(int, ushort);
template <typename To> To as_type(uint);
float exp(float);
float log(float);
float log1p(float);
float rsqrt(float);
float sincos(float, thread float&);
float fma(float, float, float);
int min(int, int);
int max(int, int);
"""
"""The names of Metal that kernels use, in C++ for OpenCL."""

ARGUMENTS = ["-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "spir64-unknown-unknown"]


class AddressSpaceError(TypeError):
    """A kernel that Metal's compiler refuses."""


def check_address_spaces(source: MetalSource) -> None:
    """Raise AddressSpaceError if a pointer of the kernel has another address space than its target."""
    body = re.sub(r"\[\[[^\]]*\]\]", "", source.kernel)
    # Outside a kernel function clang allows no memory of a threadgroup, and a template is no kernel function.
    body = SHARED_ARRAY.sub(r"__local \g<type> (&\g<name>)\g<size> = *(__local \g<type> (*)\g<size>)0;", body)
    body = re.sub(r"\bthreadgroup\b", "__local", re.sub(r"\bconstant\b", "__constant", body))
    instance = source.instance()
    if "<" in instance:
        body += f"\ntemplate decltype({instance}) {instance};\n"
    text = PRELUDE + body
    parsed = clang.Index.create().parse("kernel.cl", ARGUMENTS, [("kernel.cl", text)])
    errors = [d for d in parsed.diagnostics if d.severity >= clang.Diagnostic.Error]
    if errors:
        lines = text.splitlines()
        found = [f"{e.spelling}: {lines[e.location.line - 1].strip()}" for e in errors[:5]]
        raise AddressSpaceError(f"{instance}: " + "; ".join(found))
