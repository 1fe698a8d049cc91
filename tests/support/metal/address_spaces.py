"""A check of the address spaces of a Metal kernel's pointers, which g++ does not know.

Clang's C++ for OpenCL has the same address spaces under other names. One trap that it finds: MLX passes arrays of
fewer than 8 elements as `constant`, so a pointer of type `const device int*` fails for them on a Mac.
"""

from __future__ import annotations

import re

import clang.cindex as clang

from tests.support.metal.metal_source import SHARED_ARRAY, MetalSource

_VECTORS = [(kind, size) for kind in "float half int uint short ushort uchar ulong".split() for size in (2, 3, 4)]

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
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef half float16_t;
VECTORS
struct bfloat {
  ushort bits;
  bfloat() = default;
  bfloat(float value);
  operator float() const __private;
  operator float() const __global;
  operator float() const __local;
  operator float() const __constant;
  bfloat(const __global bfloat& other);
  bfloat(const thread bfloat& other);
  thread bfloat& operator=(bfloat other) thread;
  __global bfloat& operator=(bfloat other) __global;
  __local bfloat& operator=(bfloat other) __local;
};
typedef bfloat bfloat16_t;
template <typename T> struct two { typedef T type __attribute__((ext_vector_type(2))); };
template <> struct two<bfloat> {
  struct type { bfloat x, y; thread bfloat& operator[](int) thread; };
};
template <typename T, int Cols, int Rows> struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  thread typename two<T>::type& thread_elements() thread;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <typename T, int Cols, int Rows = Cols> simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T);
#define MATRIX simdgroup_matrix<T, C, R>
#define PLACES ulong per_row = C, ulong2 origin = 0, bool transposes = false
template <typename T, int C, int R> void simdgroup_load(thread MATRIX& d, const __local T* source, PLACES);
template <typename T, int C, int R> void simdgroup_load(thread MATRIX& d, const device T* source, PLACES);
template <typename T, int C, int R> void simdgroup_store(MATRIX a, __local T* target, PLACES);
template <typename T, int C, int R> void simdgroup_store(MATRIX a, device T* target, PLACES);
template <typename D, typename A, typename B> void simdgroup_multiply(thread D& d, thread A& a, thread B& b);
template <typename D, typename A, typename B, typename C>
void simdgroup_multiply_accumulate(thread D& d, thread A& a, thread B& b, thread C& c);
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <typename T> T simd_sum(T);
template <typename T> T simd_max(T);
template <typename T> T simd_min(T);
template <typename T> T simd_shuffle_xor(T, ushort);
template <typename T> T simd_shuffle(T, ushort);
template <typename T> T simd_shuffle_up(T, ushort);
template <typename T> T simd_shuffle_down(T, ushort);
template <typename T> T simd_broadcast(T, ushort);
template <typename To, typename From> To as_type(From);
enum memory_order { memory_order_relaxed };
int atomic_fetch_add_explicit(__local atomic_int*, int, memory_order);
float exp(float);
float exp2(float);
float abs(float);
float log(float);
float log1p(float);
float rsqrt(float);
float sincos(float, thread float&);
float fma(float, float, float);
template <typename T> T min(T, T);
template <typename T> T max(T, T);
template <typename T> T clamp(T, T, T);
"""
"""The names of Metal that kernels use, in C++ for OpenCL."""
_TYPEDEFS = [f"typedef {kind} {kind}{size} __attribute__((ext_vector_type({size})));" for kind, size in _VECTORS]
PRELUDE = PRELUDE.replace("VECTORS", "\n".join(_TYPEDEFS))

_VECTOR_CALL = re.compile(rf"\b({'|'.join(f'{kind}{size}' for kind, size in _VECTORS)})\(")
"""A vector made of its elements, which has other parentheses in OpenCL."""

ARGUMENTS = "-x cl -cl-std=clc++2021 -cl-no-stdinc -target spir64-unknown-unknown -Wno-c++11-narrowing".split()


class AddressSpaceError(TypeError):
    """A kernel that Metal's compiler refuses."""


def check_address_spaces(source: MetalSource) -> None:
    """Raise AddressSpaceError if a pointer of the kernel has another address space than its target."""
    body = re.sub(r"\[\[[^\]]*\]\]", "", source.kernel)
    # Outside a kernel function clang allows no memory of a threadgroup, and a template is no kernel function.
    body = SHARED_ARRAY.sub(r"__local \g<type> (&\g<name>)\g<size> = *(__local \g<type> (*)\g<size>)0;", body)
    body = re.sub(r"\bthreadgroup\b", "__local", re.sub(r"\bconstant\b", "__constant", body))
    body = _VECTOR_CALL.sub(r"(\1)(", body)
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
