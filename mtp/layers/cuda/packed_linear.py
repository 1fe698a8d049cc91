"""Products of few rows with 4-bit weights on the tensor cores of an NVIDIA GPU.

MLX multiplies up to 7 rows by reading the weights once for each row. This kernel reads them once for up to 32 rows. It
accumulates in fp32, in an order that does not depend on the number of rows. So the result of a row has the same bits
alone and with other rows.

The weights are stored in tiles, in the order in which the tensor cores take them. `w [tiles, chunks, 128]` uint32: a
tile is 16 outputs, a chunk 64 inputs; lane 4 g + t of a warp finds there the 16 nibbles 16 t ... 16 t + 15 of outputs
g and g + 8. `factors [tiles, chunks, 16]` uint32: scale and bias of outputs g and g + 8, each pair in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn

from mtp.layers.communicator import ALONE, Communicator
from mtp.layers.exact import ExactProducts
from mtp.layers.source_kernel import HALF_TYPES, THREADS, CudaKernel

TILE = 16
GROUP = 64
MOST_ROWS = 32
"""Rows that one launch multiplies; more would need more registers than a warp has."""

FEW_ROWS = 96
"""Rows up to which launches of `MOST_ROWS` rows are faster than unpacking the weights for a dense product."""

WIDE = 2
"""Tiles of a block: they share the inputs, which a block of one tile would load as often as its weights."""

HEADER = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T> struct Tensor;
template <> struct Tensor<__nv_bfloat16> {
  static constexpr unsigned ones = 0x3f803f80u;
  static constexpr unsigned magic = 0x43004300u;
  static constexpr float shift = 128.0f;
  static __device__ __forceinline__ float low(unsigned f) { return __uint_as_float(f << 16); }
  static __device__ __forceinline__ float high(unsigned f) { return __uint_as_float(f & 0xffff0000u); }
  static __device__ __forceinline__ void mma(
      float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};
template <> struct Tensor<__half> {
  static constexpr unsigned ones = 0x3c003c00u;
  static constexpr unsigned magic = 0x64006400u;
  static constexpr float shift = 1024.0f;
  static __device__ __forceinline__ float low(unsigned f) { return __half2float(__ushort_as_half(f & 0xffffu)); }
  static __device__ __forceinline__ float high(unsigned f) { return __half2float(__ushort_as_half(f >> 16)); }
  static __device__ __forceinline__ void mma(
      float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};
// Nibbles i and i + 4 of `w`, each as `shift` + nibble.
template <typename T>
__device__ __forceinline__ unsigned pair_of(unsigned w, int i) {
  return ((w >> (4 * i)) & 0x000f000fu) | Tensor<T>::magic;
}
"""

MULTIPLY_CHUNKS = r"""  Chunk ahead[AHEAD];
  #pragma unroll
  for (int i = 0; i < AHEAD; ++i) load(ahead[i], warp + i * WARPS);
  for (int chunk = warp; chunk < chunks; chunk += AHEAD * WARPS) {
    #pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const Chunk now = ahead[i];
      load(ahead[i], chunk + (i + AHEAD) * WARPS);
      multiply(now, chunk + i * WARPS);
    }
  }

  __shared__ float partial[PARTS][WARPS][TILES * 8][17];
  #pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    #pragma unroll
    for (int m = 0; m < TILES; ++m) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        partial[p][warp][m * 8 + 2 * t + (i & 1)][g + 8 * (i >> 1)] = acc[p][m][i];
      }
    }
  }
  __syncthreads();
"""
"""Multiply the chunks of a warp, with the next ones on their way, and gather the sums of all warps in `partial`."""

SOURCE = (
    r"""
  // w [tiles][chunks][32 lanes]: for rows g and g + 8 of a tile of 16, 16 nibbles each of a chunk of 64 inputs.
  // factors [tiles][chunks][8]: scale and bias of rows g and g + 8.
  constexpr int WARPS = 8;
  const int K = x_shape[1];
  const int M = x_shape[0];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int chunks = K / 64;
  const int tiles = w_shape[0] / (SWIGLU ? 2 : 1);
  const int N = tiles * 16;
  const int first = blockIdx.x * (SWIGLU ? 1 : PARTS);

  const uint4* w_tile[PARTS];
  const uint2* f_tile[PARTS];
  #pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    const long long tile = SWIGLU ? first + p * tiles : min(first + p, tiles - 1);
    w_tile[p] = reinterpret_cast<const uint4*>(w) + tile * chunks * 32 + lane;
    f_tile[p] = reinterpret_cast<const uint2*>(factors) + tile * chunks * 8 + g;
  }
  const uint4* x_rows[TILES];
  #pragma unroll
  for (int m = 0; m < TILES; ++m) {
    x_rows[m] = reinterpret_cast<const uint4*>(x + (long long)min(m * 8 + g, M - 1) * K + t * 16);
  }
  float acc[PARTS][TILES][4] = {};
  struct Chunk { uint4 q[PARTS]; uint2 f[PARTS]; uint4 x[2]; };
  auto load = [&](Chunk& c, int chunk) {
    if (chunk < chunks) {
      #pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        c.q[p] = __ldcs(w_tile[p] + chunk * 32);
        c.f[p] = __ldcs(f_tile[p] + chunk * 8);
      }
      c.x[0] = __ldg(x_rows[0] + chunk * 8);
      c.x[1] = __ldg(x_rows[0] + chunk * 8 + 1);
    }
  };
  auto multiply = [&](const Chunk& c, int chunk) {
    if (chunk >= chunks) return;
    float scale[PARTS][2], bias[PARTS][2];
    #pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      scale[p][0] = Tensor<InT>::low(c.f[p].x);
      scale[p][1] = Tensor<InT>::low(c.f[p].y);
      // The pairs carry `shift` besides the nibble.
      bias[p][0] = __fmaf_rn(-Tensor<InT>::shift, scale[p][0], Tensor<InT>::high(c.f[p].x));
      bias[p][1] = __fmaf_rn(-Tensor<InT>::shift, scale[p][1], Tensor<InT>::high(c.f[p].y));
    }
    #pragma unroll
    for (int m = 0; m < TILES; ++m) {
      const uint4 lo = m ? __ldg(x_rows[m] + chunk * 8) : c.x[0];
      const uint4 hi = m ? __ldg(x_rows[m] + chunk * 8 + 1) : c.x[1];
      unsigned b[4][2];
      b[0][0] = __byte_perm(lo.x, lo.z, 0x5410); b[0][1] = __byte_perm(lo.x, lo.z, 0x7632);
      b[1][0] = __byte_perm(lo.y, lo.w, 0x5410); b[1][1] = __byte_perm(lo.y, lo.w, 0x7632);
      b[2][0] = __byte_perm(hi.x, hi.z, 0x5410); b[2][1] = __byte_perm(hi.x, hi.z, 0x7632);
      b[3][0] = __byte_perm(hi.y, hi.w, 0x5410); b[3][1] = __byte_perm(hi.y, hi.w, 0x7632);
      float sum[4] = {};
      float dot[PARTS][4] = {};
      constexpr unsigned one = Tensor<InT>::ones;
      #pragma unroll
      for (int step = 0; step < 4; ++step) {
        Tensor<InT>::mma(sum, one, one, one, one, b[step][0], b[step][1]);
        #pragma unroll
        for (int p = 0; p < PARTS; ++p) {
          const unsigned top = step < 2 ? c.q[p].x : c.q[p].y;
          const unsigned low = step < 2 ? c.q[p].z : c.q[p].w;
          const int i = (step & 1) * 2;
          Tensor<InT>::mma(dot[p], pair_of<InT>(top, i), pair_of<InT>(low, i), pair_of<InT>(top, i + 1),
                           pair_of<InT>(low, i + 1), b[step][0], b[step][1]);
        }
      }
      #pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[p][m][i] = __fmaf_rn(scale[p][i >> 1], dot[p][i], acc[p][m][i]);
          acc[p][m][i] = __fmaf_rn(bias[p][i >> 1], sum[i & 1], acc[p][m][i]);
        }
      }
    }
  };
"""
    + MULTIPLY_CHUNKS
    + r"""  auto total = [&](int p, int m, int r) {
    float y = 0.0f;
    #pragma unroll
    for (int v = 0; v < WARPS; ++v) y += partial[p][v][m][r];
    return y;
  };
  constexpr int OUTS = SWIGLU ? 1 : PARTS;
  for (int j = tid; j < TILES * 8 * 16 * OUTS; j += WARPS * 32) {
    const int m = j / (16 * OUTS), p = j / 16 % OUTS, r = j % 16;
    const int n = (first + p) * 16 + r;
    if (m >= M || n >= N) continue;
    float y = total(p, m, r);
    if constexpr (SWIGLU) y = y / (1.0f + expf(-y)) * total(PARTS - 1, m, r);
    const long long at = (long long)m * N + n;
    ADD_RESIDUAL
    out[at] = static_cast<InT>(y);
  }
"""
)

UNPACK_SOURCE = r"""
  // A thread writes the 16 values of row n that lane group t holds of a chunk.
  const int chunks = w_shape[1];
  const int K = chunks * 64;
  const long long unit = (long long)blockIdx.x * 256 + threadIdx.x;
  const int t = unit & 3, chunk = (unit >> 2) % chunks;
  const long long place = (unit >> 2) / chunks;
  if (place >= COUNT) return;
  const long long n = PLACE;
  const int tile = n / 16, h = n / 8 % 2, g = n % 8;
  const long long at = (long long)tile * chunks + chunk;
  const uint2 q = reinterpret_cast<const uint2*>(w)[(at * 32 + g * 4 + t) * 2 + h];
  const unsigned f = factors[(at * 8 + g) * 2 + h];
  const float scale = Tensor<InT>::low(f), bias = Tensor<InT>::high(f);
  InT values[16];
  #pragma unroll
  for (int i = 0; i < 16; ++i) {
    values[i] = static_cast<InT>(__fmaf_rn(scale, static_cast<float>(((i < 8 ? q.x : q.y) >> (4 * (i & 7))) & 15u),
    bias));
  }
  uint4* to = reinterpret_cast<uint4*>(out + place * K + chunk * 64 + t * 16);
  to[0] = reinterpret_cast<uint4*>(values)[0];
  to[1] = reinterpret_cast<uint4*>(values)[1];
"""


def _multiply_kernel(residual: bool) -> CudaKernel:
    added = "y += static_cast<float>(residual[at]);" if residual else ""
    return CudaKernel(
        "packed_multiply_add" if residual else "packed_multiply",
        ["x", "w", "factors", *(["residual"] if residual else [])],
        ["out"],
        SOURCE.replace("ADD_RESIDUAL", added),
        HEADER,
    )


def _unpack_kernel(picked: bool) -> CudaKernel:
    source = UNPACK_SOURCE.replace("COUNT", "picked_shape[0]" if picked else "w_shape[0] * 16")
    return CudaKernel(
        "packed_rows" if picked else "packed_unpack",
        ["w", "factors", *(["picked"] if picked else [])],
        ["out"],
        source.replace("PLACE", "picked[place]" if picked else "place"),
        HEADER,
    )


_multiply, _multiply_add = _multiply_kernel(False), _multiply_kernel(True)
_unpack, _unpack_rows = _unpack_kernel(False), _unpack_kernel(True)


def multiply_rows(
    x: mx.array,
    w: mx.array,
    factors: mx.array,
    *,
    swiglu: bool = False,
    residual: mx.array | None = None,
) -> mx.array:
    """Return `x [rows, K]` times the packed weights, for up to `MOST_ROWS` rows: `[rows, N]`.

    `swiglu` takes the first half of the outputs as gate and the second half as up, and returns silu(gate) * up.
    `residual` is added before the result is rounded.
    """
    rows, tiles = x.shape[0], w.shape[0]
    blocks = tiles // 2 if swiglu else -(-tiles // WIDE)
    outputs = (tiles // 2 if swiglu else tiles) * TILE
    kernel = _multiply if residual is None else _multiply_add
    return kernel(
        [x, w, factors, *([] if residual is None else [residual])],
        blocks=(blocks, 1, 1),
        template=[
            ("InT", x.dtype),
            ("TILES", 1 if rows <= 8 else 2 if rows <= 16 else 4),
            ("SWIGLU", swiglu),
            ("PARTS", WIDE),
            ("AHEAD", 2),
        ],
        shapes=[(rows, outputs)],
        dtypes=[x.dtype],
    )[0]


def unpack(w: mx.array, factors: mx.array, dtype: mx.Dtype, rows: mx.array | None = None) -> mx.array:
    """Return the weights as `[N, K]` of `dtype`, or the outputs that int32 `rows` names."""
    tiles, chunks = w.shape[:2]
    count = tiles * TILE if rows is None else rows.size
    kernel = _unpack if rows is None else _unpack_rows
    return kernel(
        [w, factors, *([] if rows is None else [rows])],
        blocks=(-(-count * chunks * 4 // THREADS), 1, 1),
        template=[("InT", dtype)],
        shapes=[(count, chunks * GROUP)],
        dtypes=[dtype],
    )[0]


def pack(w: mx.array, scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array]:
    """Return `w` and `factors` of a 4-bit matrix of MLX: `w [N, K / 8]`, `scales` and `biases [N, K / 64]`."""
    tiles, chunks = w.shape[0] // TILE, w.shape[1] // 8
    packed = w.reshape(tiles, 2, 8, chunks, 4, 2).transpose(0, 3, 2, 4, 1, 5)
    both = mx.stack([scales, biases], axis=-1).view(mx.uint32).reshape(tiles, 2, 8, chunks)
    return (
        mx.contiguous(packed).reshape(tiles, chunks, 128),
        mx.contiguous(both.transpose(0, 3, 2, 1)).reshape(tiles, chunks, 16),
    )


def can_pack(modules: Sequence[nn.Module], *, padded: bool = False) -> bool:
    """Return whether the kernel can multiply with `modules` side by side: affine 4-bit weights in groups of 64.

    `padded` allows outputs of zero behind the last module's, up to a whole tile.
    """
    return all(
        type(module) in (nn.QuantizedLinear, nn.QuantizedEmbedding)  # a subclass has parameters that it needs
        and (module.bits, module.group_size, module.mode) == (4, GROUP, "affine")
        and "bias" not in module
        and module.scales.dtype in HALF_TYPES
        for module in modules
    ) and (padded or sum(module.weight.shape[0] for module in modules) % TILE == 0)


class PackedLinear(nn.Module):
    """Linear layers side by side, whose outputs follow each other in one row."""

    one_arithmetic = False
    """True keeps to the kernel for any number of rows. Otherwise a dense product takes over above `FEW_ROWS`."""

    def __init__(self, w: mx.array, factors: mx.array, dtype: mx.Dtype = mx.bfloat16) -> None:
        super().__init__()
        self.w = w
        self.factors = factors
        self.dtype = dtype

    @property
    def weights(self) -> tuple[mx.array, ...]:
        """The arguments of a compiled layer, from which `product_of` makes this product again."""
        return self.w, self.factors

    @classmethod
    def from_modules(cls, modules: Sequence[nn.Module]) -> Self:
        """Pack the weights of `modules`, which `can_pack` approves. The modules lose their weights."""
        fused = [mx.concatenate([m[name] for m in modules]) for name in ("weight", "scales", "biases")]
        dtype = fused[1].dtype
        if missing := -fused[0].shape[0] % TILE:
            fused = [mx.pad(part, [(0, missing), (0, 0)]) for part in fused]
        w, factors = pack(*fused)
        del fused
        for module in modules:
            for name in ("weight", "scales", "biases"):
                del module[name]
        mx.eval(w, factors)
        return cls(w, factors, dtype)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """Return `x [rows, K]` times the weights, plus `residual`."""
        if x.shape[0] <= FEW_ROWS or self.one_arithmetic:
            return _in_pieces(x, self.w, self.factors, residual=residual)
        y = x @ unpack(self.w, self.factors, x.dtype).T
        return y if residual is None else y + residual

    def swiglu(self, x: mx.array) -> mx.array:
        """Return silu(gate) * up, where the outputs are gate and up in equal parts."""
        if x.shape[0] <= FEW_ROWS or self.one_arithmetic:
            return _in_pieces(x, self.w, self.factors, swiglu=True)
        gate, up = mx.split(self(x), 2, axis=-1)
        y: mx.array = nn.silu(gate) * up
        return y

    def as_linear(self, x: mx.array) -> mx.array:
        """Return `self(x)`, by the name that an embedding has for it."""
        return self(x)

    def pin_exact(self, products: ExactProducts) -> PackedLinear:
        """Keep to the kernel, whose rows do not depend on each other."""
        self.one_arithmetic = True
        return self


class PackedEmbedding(PackedLinear):
    """An embedding that also multiplies, as a tied lm_head does."""

    dtype: mx.Dtype

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """Return the rows of the integer tokens `x [n]`."""
        assert residual is None
        return unpack(self.w, self.factors, self.dtype, x.astype(mx.int32))

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits of `x [rows, K]`."""
        return PackedLinear.__call__(self, x)


class DenseLinear(nn.Module):
    """Unquantized linear layers side by side, as one product `x [rows, K]` times `w [N, K]`."""

    def __init__(self, w: mx.array) -> None:
        super().__init__()
        self.w = w

    @property
    def weights(self) -> tuple[mx.array, ...]:
        """The arguments of a compiled layer."""
        return (self.w,)

    @classmethod
    def from_modules(cls, modules: Sequence[nn.Module]) -> Self:
        """Fuse `modules`, which `can_fuse` approves. They lose their weights."""
        w = mx.concatenate([module.weight for module in modules])
        mx.eval(w)
        for module in modules:
            del module["weight"]
        return cls(w)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """Return `x [rows, K]` times the weights, plus `residual`."""
        y = x @ self.w.T
        return y if residual is None else y + residual

    def swiglu(self, x: mx.array) -> mx.array:
        """Return silu(gate) * up, where the outputs are gate and up in equal parts."""
        gate, up = mx.split(self(x), 2, axis=-1)
        y: mx.array = nn.silu(gate) * up
        return y

    def pin_exact(self, products: ExactProducts) -> DenseLinear:
        """Raise, because a stage in exact mode keeps each layer's own product."""
        raise NotImplementedError("fused dense weights have no exact mode")


def can_fuse(modules: Sequence[nn.Module]) -> bool:
    """Return whether `modules` are unquantized linear layers of one type."""
    plain = all(type(module) is nn.Linear and "bias" not in module for module in modules)
    return plain and len({module.weight.dtype for module in modules}) == 1


class SideBySide(nn.Module):
    """Linear layers whose outputs follow each other in one row, each multiplied by itself."""

    weights: tuple[mx.array, ...] = ()
    """None of them is the argument of a compiled layer."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = list(modules)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """Return the parts' outputs for `x [rows, K]`, side by side, plus `residual`."""
        outputs = [part(x) for part in self.parts]
        y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=-1)
        return y if residual is None else y + residual

    def pin_exact(self, products: ExactProducts) -> SideBySide:
        """Fuse the parts to one product where a kernel computes it, or replace each of them."""
        fused = products.fused_rows(self.parts)
        self.parts = [products.replaced(part) for part in self.parts] if fused is None else [fused]
        return self


Projection = PackedLinear | DenseLinear | SideBySide


def fused(modules: Sequence[nn.Module], *, padded: bool = False, exact: bool = False) -> Projection:
    """Return `modules` as one projection. If it packs or fuses their weights, they lose them.

    `padded` allows outputs of zero behind the last module's. In `exact` mode unquantized layers stay apart.
    """
    if can_pack(modules, padded=padded):
        return PackedLinear.from_modules(modules)
    return DenseLinear.from_modules(modules) if not exact and can_fuse(modules) else SideBySide(modules)


def product_of(weights: Projection | Sequence[mx.array]) -> Projection:
    """Return the product of the `weights` of a projection, within a compiled layer, or the projection that it is."""
    if isinstance(weights, nn.Module):
        return weights
    return PackedLinear(weights[0], weights[1]) if len(weights) == 2 else DenseLinear(weights[0])


def add_product(communicator: Communicator, product: Callable[..., mx.array], y: mx.array, x: mx.array) -> mx.array:
    """Return `x` plus the sum over the members of the product of `y`. One machine adds `x` in the same launch."""
    return product(y, x) if communicator.size == 1 else x + communicator.sum(product(y))


class PackedMLP(nn.Module):
    """The gated MLP of a dense layer: two launches for up to `MOST_ROWS` rows of packed weights."""

    communicator: Communicator = ALONE

    def __init__(self, gate_up: PackedLinear | DenseLinear, down: PackedLinear | DenseLinear) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def add_output(self, x: mx.array, norm: Callable[[mx.array], mx.array]) -> mx.array:
        """Return `x [rows, hidden]` plus the MLP of its norm."""
        return add_product(self.communicator, self.down, self.gate_up.swiglu(norm(x)), x)

    def pin_exact(self, products: ExactProducts) -> None:
        """Keep to the kernels."""
        self.gate_up.pin_exact(products)
        self.down.pin_exact(products)

    def weights(self, norm: nn.RMSNorm) -> tuple[Any, ...]:
        """Return what `PackedEnds.finish` takes of the MLP and its norm."""
        return norm.weight, self.gate_up.weights, self.down.weights


def pack_mlp(mlp: nn.Module, *, exact: bool = False) -> PackedMLP | None:
    """Return a dense MLP packed or fused, or None for any other. In `exact` mode unquantized layers stay apart."""
    names = ("gate_proj", "up_proj", "down_proj")
    if not all(name in mlp for name in names):
        return None
    gate, up, down = (mlp[name] for name in names)
    # Each tile of gates needs its own tile of ups beside it.
    if not (can_pack([gate]) and can_pack([up]) and can_pack([down])):
        if exact or not can_fuse([gate, up, down]):
            return None
        return PackedMLP(DenseLinear.from_modules([gate, up]), DenseLinear.from_modules([down]))
    return PackedMLP(PackedLinear.from_modules([gate, up]), PackedLinear.from_modules([down]))


@dataclass(frozen=True)
class PackedEnds:
    """The products of a layer before and after its mixer, whose norms have the epsilon `eps`. See `Ends`."""

    eps: float
    communicator: Communicator = ALONE
    most_rows: ClassVar[int] = FEW_ROWS

    def project(self, x: mx.array, arguments: Any) -> mx.array:
        """See `Ends`. The arguments are the weight of the norm and the projection or its weights."""
        norm, inputs = arguments
        return product_of(inputs)(mx.fast.rms_norm(x, norm, self.eps))

    def finish(self, x: mx.array, y: mx.array, arguments: Any) -> mx.array:
        """See `Ends`. The arguments are the projection or its weights, and perhaps `PackedMLP.weights`."""
        out, mlp = arguments
        x = add_product(self.communicator, product_of(out), y, x)
        if not mlp:
            return x
        norm, gate_up, down = mlp
        y = product_of(gate_up).swiglu(mx.fast.rms_norm(x, norm, self.eps))
        return add_product(self.communicator, product_of(down), y, x)


def _in_pieces(
    x: mx.array,
    w: mx.array,
    factors: mx.array,
    *,
    swiglu: bool = False,
    residual: mx.array | None = None,
) -> mx.array:
    """Return `multiply_rows` of any number of rows, `MOST_ROWS` at a time."""
    if x.shape[0] <= MOST_ROWS:
        return multiply_rows(x, w, factors, swiglu=swiglu, residual=residual)
    pieces = []
    for start in range(0, x.shape[0], MOST_ROWS):
        part = slice(start, start + MOST_ROWS)
        added = None if residual is None else residual[part]
        pieces.append(multiply_rows(x[part], w, factors, swiglu=swiglu, residual=added))
    return mx.concatenate(pieces)
