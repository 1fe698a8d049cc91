"""Matrices of simdgroups, vectors and counts of the runner of Metal kernels, against numpy."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.metal.address_spaces import AddressSpaceError
from tests.support.metal.runner import MetalError, count_launches, metal_kernel, reason_not_to_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(reason_not_to_run() is not None, reason=reason_not_to_run() or "Metal kernels run"),
]

TYPES = [mx.float32, mx.float16, mx.bfloat16]
LANES = np.arange(32)
LANE_ROWS = (LANES // 4 & 4) + LANES // 2 % 4
LANE_COLUMNS = (LANES // 4 & 2) * 2 + LANES % 2 * 2
"""The row of each lane's elements and the column of the first, as in MLX's steel/gemm/mma.h."""


def run(
    source: str, *inputs: mx.array, shape: tuple[int, ...] = (8, 8), dtype: mx.Dtype = mx.float32, **options: Any
) -> np.ndarray:
    """Run `source` over the inputs `a`, `b`, `c`, by one simdgroup unless `options` say otherwise. Return `y`."""
    names = ["a", "b", "c"][: len(inputs)]
    kernel = metal_kernel("tried", names, ["y"], source)
    options = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1)} | options
    found = kernel(inputs=list(inputs), output_shapes=[shape], output_dtypes=[dtype], **options)[0]
    return np.array(found.astype(mx.float32))


def matrix(seed: int, shape: tuple[int, ...] = (8, 8), dtype: mx.Dtype = mx.float32) -> mx.array:
    """Return random small integers, whose products and sums are exact in each type."""
    return mx.random.randint(-4, 5, shape, key=mx.random.key(seed)).astype(dtype)


def numbers(x: mx.array) -> np.ndarray:
    """Return `x` as numpy's fp32."""
    return np.array(x.astype(mx.float32))


ACCUMULATE = """
  simdgroup_matrix<A, 8, 8> left;
  simdgroup_matrix<B, 8, 8> right;
  simdgroup_float8x8 start, sum;
  simdgroup_load(left, a);
  simdgroup_load(right, b);
  simdgroup_load(start, c);
  simdgroup_multiply_accumulate(sum, left, right, start);
  simdgroup_store(sum, y);
"""


@pytest.mark.parametrize(
    ("left", "right"), [*zip(TYPES, TYPES, strict=True), (mx.float16, mx.float32), (mx.float32, mx.bfloat16)]
)
def test_products_of_all_types_accumulate_in_fp32(left: mx.Dtype, right: mx.Dtype) -> None:
    """Operands of two types give d = a b + c in fp32."""
    a, b, c = matrix(1, dtype=left), matrix(2, dtype=right), matrix(3)
    found = run(ACCUMULATE, a, b, c, template=[("A", left), ("B", right)])
    assert np.array_equal(found, numbers(a) @ numbers(b) + numbers(c))


MULTIPLY = """
  simdgroup_matrix<T, 8, 8> left, right, product;
  simdgroup_load(left, a);
  simdgroup_load(right, b);
  simdgroup_multiply(product, left, right);
  simdgroup_store(product, y);
"""


@pytest.mark.parametrize("dtype", TYPES)
def test_a_product_is_rounded_to_its_type(dtype: mx.Dtype) -> None:
    """A product of half precision is the sum in fp32, rounded once."""
    a, b = (mx.random.normal((8, 8), key=mx.random.key(seed)).astype(dtype) for seed in (4, 5))
    found = run(MULTIPLY, a, b, dtype=dtype, template=[("T", dtype)])
    exact = numbers(a).astype(np.float64) @ numbers(b).astype(np.float64)
    expected = numbers(mx.array(exact.astype(np.float32)).astype(dtype))
    tolerance = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}[dtype]
    assert np.allclose(found, expected, rtol=tolerance, atol=1e-6)


THROUGH = """
  threadgroup T held[12 * 20];
  const uint lane = thread_index_in_simdgroup;
  for (uint i = lane; i < 240; i += 32) held[i] = a[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<T, 8, 8> tile;
  LOAD
  simdgroup_store(tile, y);
"""
LOADS = {
    "device": ("simdgroup_load(tile, a, 20);", lambda x: x[:8, :8]),
    "threadgroup": ("simdgroup_load(tile, held, 20);", lambda x: x[:8, :8]),
    "origin": ("simdgroup_load(tile, held, 20, ulong2(9, 3));", lambda x: x[3:11, 9:17]),
    "transposed": ("simdgroup_load(tile, held + 2, 20, ulong2(0, 0), true);", lambda x: x[:8, 2:10].T),
    "transposed device": ("simdgroup_load(tile, a + 20, 20, 0, true);", lambda x: x[1:9, :8].T),
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, mx.float32) for kind in LOADS), ("transposed", mx.float16), ("origin", mx.bfloat16)],
)
def test_a_load_reads_the_named_elements(kind: str, dtype: mx.Dtype) -> None:
    """A load honours the elements of a row, the origin, the transposition and both kinds of memory."""
    load, expected = LOADS[kind]
    x = mx.arange(240, dtype=mx.float32).reshape(12, 20).astype(dtype)
    found = run(THROUGH.replace("LOAD", load), x, dtype=dtype, template=[("T", dtype)])
    assert np.array_equal(found, expected(numbers(x)))


STORES = {
    "rows": ("simdgroup_store(tile, y, 20);", (slice(8), slice(8)), False),
    "origin": ("simdgroup_store(tile, y, 20, ulong2(9, 3));", (slice(3, 11), slice(9, 17)), False),
    "transposed": ("simdgroup_store(tile, y + 2, 20, ulong2(0, 0), true);", (slice(8), slice(2, 10)), True),
    "threadgroup": (
        "threadgroup float held[8 * 9]; simdgroup_store(tile, held, 9);"
        "simdgroup_barrier(mem_flags::mem_threadgroup);"
        "for (uint i = thread_index_in_simdgroup; i < 64; i += 32) y[i / 8 * 20 + i % 8] = held[i / 8 * 9 + i % 8];",
        (slice(8), slice(8)),
        False,
    ),
}


@pytest.mark.parametrize("kind", STORES)
def test_a_store_writes_the_named_elements_only(kind: str) -> None:
    """A store honours the elements of a row, the origin and the transposition, and writes nothing else."""
    store, place, is_transposed = STORES[kind]
    x = matrix(6)
    found = run(f"simdgroup_float8x8 tile; simdgroup_load(tile, a); {store}", x, shape=(12, 20))
    assert np.array_equal(found[place], numbers(x).T if is_transposed else numbers(x))
    assert np.isfinite(found).sum() == 64


ELEMENTS = """
  simdgroup_matrix<T, 8, 8> tile;
  simdgroup_load(tile, a);
  for (uint i = 0; i < 2; ++i) y[2 * thread_index_in_simdgroup + i] = tile.thread_elements()[i];
"""
FROM_ELEMENTS = """
  simdgroup_float8x8 tile;
  for (uint i = 0; i < 2; ++i) tile.thread_elements()[i] = a[2 * thread_index_in_simdgroup + i];
  simdgroup_store(tile, y);
"""


@pytest.mark.parametrize("dtype", TYPES)
def test_a_lane_holds_the_elements_that_it_holds_in_mlx(dtype: mx.Dtype) -> None:
    """Each lane has two neighbours of a row, where MLX's matrix products rely on them."""
    x = mx.arange(64, dtype=mx.float32).reshape(8, 8).astype(dtype)
    found = run(ELEMENTS, x, shape=(32, 2), dtype=dtype, template=[("T", dtype)])
    expected = 8 * LANE_ROWS[:, None] + LANE_COLUMNS[:, None] + np.arange(2)
    assert np.array_equal(found, expected)
    assert sorted(expected.reshape(-1)) == list(range(64))


def test_elements_that_a_lane_writes_are_those_of_the_matrix() -> None:
    """A matrix made of its lanes' elements is stored in their places."""
    x = mx.arange(64, dtype=mx.float32)
    found = run(FROM_ELEMENTS, x)
    assert np.array_equal(found[LANE_ROWS, LANE_COLUMNS], np.arange(0, 64, 2))
    assert np.array_equal(found[LANE_ROWS, LANE_COLUMNS + 1], np.arange(1, 64, 2))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("make_filled_simdgroup_matrix<float, 8>(3.0f)", np.full((8, 8), 3.0)),
        ("make_filled_simdgroup_matrix<float, 8, 8>(2.0f)", np.full((8, 8), 2.0)),
        ("simdgroup_float8x8(3.0f)", 3.0 * np.eye(8)),
        ("simdgroup_float8x8()", np.full((8, 8), np.nan)),
    ],
)
def test_a_new_matrix_is_filled_diagonal_or_nan(value: str, expected: np.ndarray) -> None:
    """A matrix of one number is a diagonal, as in Apple's specification, and one without it has no defined elements."""
    found = run(f"simdgroup_float8x8 tile = {value}; simdgroup_store(tile, y);")
    assert np.array_equal(found, expected, equal_nan=True)


EXCHANGE = """
  threadgroup float held[64];
  simdgroup_float8x8 tile, turned;
  simdgroup_load(tile, a);
  simdgroup_store(tile, held);
  BARRIER
  simdgroup_load(turned, held, 8, 0, true);
  simdgroup_store(turned, y);
"""


def test_a_missing_barrier_beside_a_matrix_changes_the_result() -> None:
    """A simdgroup loads what it has stored only if a barrier stands between."""
    x, barrier = matrix(7), "simdgroup_barrier(mem_flags::mem_threadgroup);"
    for _ in range(5):
        assert np.array_equal(run(EXCHANGE.replace("BARRIER", barrier), x), numbers(x).T)
        assert not np.array_equal(run(EXCHANGE.replace("BARRIER", ""), x), numbers(x).T)


HALF = "thread_index_in_simdgroup < 16"
WRONG = {
    "a load by half of the lanes": (f"if ({HALF}) simdgroup_load(tile, a);", "different things"),
    "a product by half of the lanes": (
        f"if ({HALF}) simdgroup_multiply_accumulate(tile, tile, tile, tile);",
        "different things",
    ),
    "lanes that end": (f"if ({HALF}) return;", "never come"),
    "products in two branches": (
        f"if ({HALF})\n simdgroup_multiply(tile, tile, tile);\nelse\n simdgroup_multiply(tile, tile, tile);",
        "different branches",
    ),
    "a load beside a store": (
        f"if ({HALF}) simdgroup_load(tile, a); else simdgroup_store(tile, y);",
        "different things",
    ),
    "an address that differs": ("simdgroup_load(tile, a + thread_index_in_simdgroup / 16);", "different arguments"),
    "a target that differs": ("simdgroup_store(tile, y + thread_index_in_simdgroup / 16);", "different arguments"),
    "a stride that differs": (f"simdgroup_load(tile, a, {HALF} ? 8 : 7);", "different arguments"),
    "an origin of a transposed matrix": ("simdgroup_load(tile, a, 8, ulong2(1, 0), true);", "not specified"),
    "too much memory": ("threadgroup float big[8193]; big[0] = a[0];", "more than 32 KB"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_use_of_a_matrix_is_an_error(kind: str) -> None:
    """Divergent lanes, arguments that differ between lanes, and unspecified uses fail."""
    source, message = WRONG[kind]
    with pytest.raises(MetalError, match=message):
        run(f"simdgroup_float8x8 tile = simdgroup_float8x8(1.0f);\n{source}\nsimdgroup_store(tile, y);", matrix(8))


def test_a_matrix_needs_all_lanes() -> None:
    """A threadgroup of 16 threads has no matrices."""
    with pytest.raises(MetalError, match="fewer than 32 lanes"):
        run("simdgroup_float8x8 t; simdgroup_load(t, a); simdgroup_store(t, y);", matrix(8), grid=(16, 1, 1))


@pytest.mark.parametrize("size", [3, 64])
def test_a_matrix_has_the_type_and_the_memory_of_its_source(size: int) -> None:
    """Metal loads no matrix from `constant` memory, nor from another type."""
    with pytest.raises((AddressSpaceError, MetalError), match="simdgroup_load"):
        run("simdgroup_half8x8 t; simdgroup_load(t, a);", mx.zeros((size,), mx.float32 if size > 8 else mx.float16))


PRODUCT = """
  constexpr int K = 512, N = 256;
  threadgroup float part[4 * 64];
  const int group = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
  const int row = 8 * threadgroup_position_in_grid.y, column = 8 * threadgroup_position_in_grid.x;
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8>(0.0f);
  for (int k = 8 * group; k < K; k += 32) {
    simdgroup_float8x8 left, right;
    simdgroup_load(left, a, K, ulong2(k, row));
    simdgroup_load(right, b + column * K + k, K, 0, true);
    simdgroup_multiply_accumulate(sum, left, right, sum);
  }
  simdgroup_store(sum, part + 64 * group);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 32 * group + lane; i < 64; i += 128)
    y[(row + i / 8) * N + column + i % 8] = part[i] + part[64 + i] + part[128 + i] + part[192 + i];
"""
TILES: dict[str, Any] = {"grid": (128 * 32, 8, 1), "threadgroup": (128, 1, 1), "shape": (64, 256)}


def test_a_product_of_many_tiles_is_that_of_numpy() -> None:
    """Four simdgroups of a threadgroup share the sum of a tile, over 64 rows and 256 outputs."""
    a, b = matrix(9, (64, 512)), matrix(10, (256, 512))
    assert np.array_equal(run(PRODUCT, a, b, **TILES), numbers(a) @ numbers(b).T)


def test_reads_are_counted_by_buffer() -> None:
    """Each row of tiles reads all of `b`, and each column of tiles all of `a`."""
    a, b = matrix(9, (64, 512)), matrix(10, (256, 512))
    with count_launches() as launches:
        found = run(PRODUCT, a, b, **TILES)
    assert np.array_equal(found, numbers(a) @ numbers(b).T)
    (launch,) = launches
    assert launch.reads["a"] == launch.distinct_reads["a"] == a.nbytes * 32
    assert launch.reads["b"] == launch.distinct_reads["b"] == b.nbytes * 8
    assert launch.reads["y"] == 0
    assert (launch.kernel, launch.threads, launch.shared_bytes) == ("tried", 128, 1024)


def test_a_word_is_distinct_once_in_each_threadgroup() -> None:
    """Two threadgroups whose 64 threads read the same 16 bytes read them 64 times each, and two times distinctly."""
    source = "y[thread_position_in_grid.x] = a[thread_index_in_threadgroup % 8];"
    with count_launches() as launches:
        run(source, matrix(11).astype(mx.bfloat16), shape=(128,), grid=(128, 1, 1), threadgroup=(64, 1, 1))
    assert launches[0].reads["a"] == 2 * 64 * 2
    assert launches[0].distinct_reads["a"] == 2 * 16


def test_reads_are_counted_inside_the_block_only() -> None:
    """A launch after the block is not counted, and its read behind the end is not seen."""
    source = "y[thread_index_in_simdgroup] = a[BEHIND + thread_index_in_simdgroup];"
    inside, outside = source.replace("BEHIND", "0"), source.replace("BEHIND", "33")
    with count_launches() as launches:
        run(inside, matrix(12))
        with pytest.raises(MetalError, match="reads outside a buffer"):
            run(outside, matrix(12))
    run(outside, matrix(12))
    assert len(launches) == 1


VECTORS = """
  const uint lane = thread_index_in_simdgroup;
  const uint4 words = *(const device uint4*)(a + 4 * lane);
  uint2 low = words.xy & 0xffffu;
  low += words.zw >> 16;
  const half2 parts = as_type<half2>(words.x);
  float4 found = float4(float(low.x), float(low.y), float(parts.x), float(parts.y));
  found = found * 2.0f + float4(1.0f, 0.0f, 0.0f, 0.0f);
  for (int i = 0; i < 4; ++i) y[4 * lane + i] = found[i];
"""


def test_vectors_compute_by_element() -> None:
    """Vectors are read whole, have halves and elements, and compute with numbers and with each other."""
    words = np.random.default_rng(13).integers(0, 2**32, (32, 4), np.uint32)
    words[:, 0] = np.random.default_rng(14).standard_normal((32, 2)).astype(np.float16).view(np.uint32)[:, 0]
    found = run(VECTORS, mx.array(words), shape=(32, 4))
    low = (words[:, :2] & 0xFFFF) + (words[:, 2:] >> 16)
    halves = np.ascontiguousarray(words[:, 0]).view(np.float16).reshape(32, 2)
    expected = np.concatenate([low, halves], 1).astype(np.float32) * 2 + np.array([1, 0, 0, 0], np.float32)
    assert np.array_equal(found, expected)


SHUFFLES = {
    "simd_shuffle(x, (lane * 5 + 3) % 32)": lambda x: x[(LANES * 5 + 3) % 32],
    "simd_shuffle_xor(x, 18)": lambda x: x[LANES ^ 18],
    "simd_shuffle_up(x, 3)": lambda x: np.concatenate([x[:3], x[:-3]]),
    "simd_shuffle_down(x, 3)": lambda x: np.concatenate([x[3:], x[-3:]]),
    "simd_broadcast(x, 7)": lambda x: np.full(32, x[7]),
    "simd_sum(x)": lambda x: np.full(32, x.sum()),
    "simd_max(x)": lambda x: np.full(32, x.max()),
    "simd_min(x)": lambda x: np.full(32, x.min()),
}


def test_lanes_exchange_values() -> None:
    """Shuffles and reductions give each lane what Apple's specification says."""
    x = matrix(15, (32,))
    calls = "\n".join(f"y[{32 * place} + lane] = {call};" for place, call in enumerate(SHUFFLES))
    found = run(
        f"const uint lane = thread_index_in_simdgroup; const float x = a[lane];\n{calls}", x, shape=(len(SHUFFLES), 32)
    )
    for row, call in zip(found, SHUFFLES, strict=True):
        assert np.array_equal(row, SHUFFLES[call](numbers(x))), call


def test_sources_name_only_what_the_check_of_address_spaces_knows() -> None:
    """A kernel may not use a name of the C++ library that Metal lacks."""
    with pytest.raises(AddressSpaceError, match=re.escape("memcpy")):
        run("float held; memcpy(&held, &a[0], 4); y[0] = held;", matrix(16))
