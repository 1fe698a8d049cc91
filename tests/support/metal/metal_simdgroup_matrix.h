// The matrices of a simdgroup, as in section 6.7 of Apple's Metal Shading Language Specification.
//
// The specification has one type for all operands. Apple's compiler takes others beside it, as llama.cpp does, and so
// does this. Two things are not in the specification: which elements a lane holds, here as in MLX's
// steel/gemm/mma.h, and the order of a product's sum, which no kernel may rely on.
#pragma once

namespace metal {

template <typename T, int Cols, int Rows> struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "Metal has matrices of 8 x 8");
  typedef vec<T, 2> storage_type;

  // NaN until it is written.
  simdgroup_matrix() { memset(&held, 0xff, sizeof(held)); }
  // A diagonal, not a filled matrix.
  explicit simdgroup_matrix(T diagonal) : held(T(0)) {
    for (int i = 0; i < 2; ++i)
      if (row() == column() + i) held[i] = diagonal;
  }
  storage_type& thread_elements() { return held; }
  const storage_type& thread_elements() const { return held; }

  // The row of this lane's elements, and the column of the first.
  static uint row() { return ((gpu::current->lane / 4) & 4) + (gpu::current->lane / 2) % 4; }
  static uint column() { return ((gpu::current->lane / 4) & 2) * 2 + (gpu::current->lane % 2) * 2; }

 private:
  storage_type held;
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int Cols, int Rows = Cols>
inline simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Cols, Rows> found;
  found.thread_elements() = value;
  return found;
}

}  // namespace metal

namespace gpu {

inline void require_full_simdgroup() {
  if (own_simdgroup().members != 32) fail("a matrix in a simdgroup of fewer than 32 lanes");
}

// Where each element of this lane is in memory that all lanes name alike.
template <typename M> struct Places {
  ulong first, step;
  Places(ulong per_row, ulong2 origin, bool transposes) {
    // The specification does not say whether the origin of a transposed matrix is transposed as well.
    if (transposes && (origin.x || origin.y)) fail("an origin of a transposed matrix, which is not specified");
    const ulong row = M::row(), column = M::column();
    first = transposes ? column * per_row + row : (origin.y + row) * per_row + origin.x + column;
    step = transposes ? per_row : 1;
  }
};

inline uint64_t common_of(const void* memory, ulong per_row, ulong2 origin, bool transposes) {
  return reinterpret_cast<uint64_t>(memory) * 31 + per_row * 1000003 + origin.x * 65537 + origin.y * 257 + transposes;
}

}  // namespace gpu

namespace metal {

// A lane reads before the lanes meet and writes after it, so a missing barrier beside these changes the result.
template <typename T, int Cols, int Rows>
inline void simdgroup_load(simdgroup_matrix<T, Cols, Rows>& d, const std::type_identity_t<T>* src,
                           ulong elements_per_row = Cols, ulong2 matrix_origin = 0, bool transpose_matrix = false,
                           LINE) {
  gpu::require_full_simdgroup();
  const gpu::Places<simdgroup_matrix<T, Cols, Rows>> places(elements_per_row, matrix_origin, transpose_matrix);
  for (int i = 0; i < 2; ++i) d.thread_elements()[i] = src[places.first + i * places.step];
  const uint64_t common = gpu::common_of(src, elements_per_row, matrix_origin, transpose_matrix);
  gpu::meet(gpu::own_simdgroup(), "simdgroup_load", line, common);
}

template <typename T, int Cols, int Rows>
inline void simdgroup_store(simdgroup_matrix<T, Cols, Rows> a, std::type_identity_t<T>* dst,
                            ulong elements_per_row = Cols, ulong2 matrix_origin = 0, bool transpose_matrix = false,
                            LINE) {
  gpu::require_full_simdgroup();
  const uint64_t common = gpu::common_of(dst, elements_per_row, matrix_origin, transpose_matrix);
  gpu::meet(gpu::own_simdgroup(), "simdgroup_store", line, common);
  const gpu::Places<simdgroup_matrix<T, Cols, Rows>> places(elements_per_row, matrix_origin, transpose_matrix);
  for (int i = 0; i < 2; ++i) dst[places.first + i * places.step] = a.thread_elements()[i];
}

// d = a * b + c
template <typename D, typename A, typename B, typename C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8>& a,
                                          simdgroup_matrix<B, 8, 8>& b, simdgroup_matrix<C, 8, 8>& c, LINE) {
  struct Held { float a[2], b[2]; };
  gpu::require_full_simdgroup();
  Held own, lanes[32];
  for (int i = 0; i < 2; ++i) {
    own.a[i] = float(a.thread_elements()[i]);
    own.b[i] = float(b.thread_elements()[i]);
  }
  gpu::exchange(own, lanes, "simdgroup_multiply_accumulate", line);
  const uint row = simdgroup_matrix<D, 8, 8>::row(), column = simdgroup_matrix<D, 8, 8>::column();
  // The lane of an element whose row and column are `row` and `column`.
  const auto lane_of = [](uint row, uint column) {
    return (row & 4) * 4 + (row & 3) * 2 + (column & 4) * 2 + (column & 2) / 2;
  };
  for (uint i = 0; i < 2; ++i) {
    float sum = float(c.thread_elements()[i]);
    for (uint k = 0; k < 8; ++k) {
      const float left = lanes[lane_of(row, k)].a[k & 1], right = lanes[lane_of(k, column)].b[i];
      sum = ::fmaf(left, right, sum);
    }
    d.thread_elements()[i] = D(sum);
  }
}

// d = a * b
template <typename D, typename A, typename B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8>& a,
                               simdgroup_matrix<B, 8, 8>& b, LINE) {
  auto zeros = make_filled_simdgroup_matrix<float, 8>(0.0f);
  simdgroup_multiply_accumulate(d, a, b, zeros, line);
}

}  // namespace metal
