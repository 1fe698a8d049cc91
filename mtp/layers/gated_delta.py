"""One GatedDeltaNet window as one launch on a GPU, the same text for NVIDIA and Apple.

A block computes one value head of one sequence: convolution, silu, the norms of q and k, the gates, the recurrence
and the gated norm of its output. The state stays in registers in fp32. The order of every sum is fixed, so a token's
result does not depend on the tokens that run with it.

The tokens of a sequence are those of an earlier window that follow its state (`past`), then those that run now. The
kernel saves the state after any number of them. So a rollback saves after fewer tokens, and nothing is computed twice
with different arithmetic.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from mtp.layers.gdn_windows import HEAD_DIM, TAPS, GatedDeltaShape, Recurrence, WindowKernel
from mtp.layers.source_kernel import SourceKernel

THREADS = 512
"""Threads of a block: four for each of the 128 rows of a state."""

INPUTS = ["rows", "past", "conv", "state", "spans", "conv_w", "A_log", "dt_bias", "norm_w", "eps"]
OUTPUTS = ["out", "conv_out", "state_out"]

SOURCE = r"""
  constexpr int D = 128;
  constexpr int TILE = 8;
  constexpr int LANES = 4;
  const int head = blockIdx.x;
  const int seq = blockIdx.y;
  const int tid = threadIdx.x;
  const int lane = tid & 31;
  const int warp = tid >> 5;
  constexpr int KEYS = HK * D;
  constexpr int CHANNELS = 2 * KEYS + HV * D;
  const int width = rows_shape[1];
  $span span = spans + seq * 6;
  const int slot = span[0];
  const int past_start = span[1];
  const int past_count = span[2];
  const int start = span[3];
  const int count = span[4];
  const int save_at = span[5];
  const int total = past_count + count;
  const int key_head = head / (HV / HK);
  const $device InT* conv_ = conv + ($int64)slot * (TAPS - 1) * CHANNELS;

  $array float inputs[TILE][3 * D];
  $array float gates[TILE][2];
  $array float results[TILE][D];

  // Channel of element e of this head's q, k and v.
  auto channel = [&](int e) {
    return e < D ? key_head * D + e
                 : e < 2 * D ? KEYS + key_head * D + (e - D)
                             : 2 * KEYS + head * D + (e - 2 * D);
  };
  auto row_of = [&](int i) -> const $device InT* {
    return i < past_count ? past + ($int64)(past_start + i) * width
                          : rows + ($int64)(start + i - past_count) * width;
  };
  auto input = [&](int i, int c) -> float {
    return static_cast<float>(i < 0 ? conv_[(TAPS - 1 + i) * CHANNELS + c] : row_of(i)[c]);
  };

  // Thread (row, part) holds elements {16 i + 4 part ... + 3} of state row `row`.
  const int row = tid / LANES;
  const int part = tid % LANES;
  float s[32];
  {
    const $device float4* from = reinterpret_cast<const $device float4*>(
        state + (($int64)slot * HV + head) * D * D + row * D);
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      float4 f = from[i * LANES + part];
      s[4 * i] = f.x; s[4 * i + 1] = f.y; s[4 * i + 2] = f.z; s[4 * i + 3] = f.w;
    }
  }
  auto save = [&]() {
    $device float4* to = reinterpret_cast<$device float4*>(
        state_out + (($int64)seq * HV + head) * D * D + row * D);
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      to[i * LANES + part] = make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    }
  };
  const float decay_rate = -expf(static_cast<float>(A_log[head]));
  const float dt = static_cast<float>(dt_bias[head]);

  if (save_at == 0) save();
  for (int first = 0; first < total; first += TILE) {
    const int n = min(TILE, total - first);
    // Convolution and silu.
    for (int j = tid; j < n * 3 * D; j += 512) {
      const int t = j / (3 * D), e = j % (3 * D), c = channel(e);
      float sum = 0.0f;
      #pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) {
        sum = __fmaf_rn(input(first + t + tap - (TAPS - 1), c),
                        static_cast<float>(conv_w[c * TAPS + tap]), sum);
      }
      inputs[t][e] = sum / (1.0f + expf(-sum));
    }
    if (tid < n) {
      const $device InT* r = row_of(first + tid) + CHANNELS + HV * D;
      const float b = static_cast<float>(r[head]);
      const float a = static_cast<float>(r[HV + head]) + dt;
      const float soft = a > 20.0f ? a : log1pf(expf(a));
      gates[tid][0] = expf(decay_rate * soft);
      gates[tid][1] = 1.0f / (1.0f + expf(-b));
    }
    __syncthreads();
    // q and k to length one; q takes the scale of the readout.
    {
      const int t = warp >> 1, which = warp & 1;
      if (t < n) {
        $shared float* v = &inputs[t][which * D];
        float sum = 0.0f;
        #pragma unroll
        for (int i = 0; i < 4; ++i) sum = __fmaf_rn(v[lane + 32 * i], v[lane + 32 * i], sum);
        #pragma unroll
        for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
        const float scale = rsqrtf(sum + 1e-6f) * (which ? 1.0f : 0.08838834764831845f);
        #pragma unroll
        for (int i = 0; i < 4; ++i) v[lane + 32 * i] = __fmul_rn(v[lane + 32 * i], scale);
      }
    }
    __syncthreads();
    for (int t = 0; t < n; ++t) {
      const float g = gates[t][0];
      const $shared float4* q4 = reinterpret_cast<const $shared float4*>(inputs[t]);
      const $shared float4* k4 = reinterpret_cast<const $shared float4*>(inputs[t] + D);
      float sum = 0.0f;
      #pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 k = k4[i * LANES + part];
        s[4 * i] = __fmul_rn(s[4 * i], g); sum = __fmaf_rn(s[4 * i], k.x, sum);
        s[4 * i + 1] = __fmul_rn(s[4 * i + 1], g); sum = __fmaf_rn(s[4 * i + 1], k.y, sum);
        s[4 * i + 2] = __fmul_rn(s[4 * i + 2], g); sum = __fmaf_rn(s[4 * i + 2], k.z, sum);
        s[4 * i + 3] = __fmul_rn(s[4 * i + 3], g); sum = __fmaf_rn(s[4 * i + 3], k.w, sum);
      }
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const float delta = __fmul_rn(inputs[t][2 * D + row] - sum, gates[t][1]);
      float out = 0.0f;
      #pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 k = k4[i * LANES + part];
        const float4 q = q4[i * LANES + part];
        s[4 * i] = __fmaf_rn(k.x, delta, s[4 * i]); out = __fmaf_rn(s[4 * i], q.x, out);
        s[4 * i + 1] = __fmaf_rn(k.y, delta, s[4 * i + 1]); out = __fmaf_rn(s[4 * i + 1], q.y, out);
        s[4 * i + 2] = __fmaf_rn(k.z, delta, s[4 * i + 2]); out = __fmaf_rn(s[4 * i + 2], q.z, out);
        s[4 * i + 3] = __fmaf_rn(k.w, delta, s[4 * i + 3]); out = __fmaf_rn(s[4 * i + 3], q.w, out);
      }
      out += __shfl_xor_sync(0xffffffff, out, 1);
      out += __shfl_xor_sync(0xffffffff, out, 2);
      if (part == 0) results[t][row] = out;
      if (first + t + 1 == save_at) save();
    }
    __syncthreads();
    // Norm over the head, and the gate z.
    if (warp < n && first + warp >= past_count) {
      const int t = warp;
      const $device InT* z = row_of(first + t) + CHANNELS + head * D;
      $device InT* to = out + ($int64)(start + first + t - past_count) * HV * D + head * D;
      float sum = 0.0f;
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float y = results[t][lane + 32 * i];
        sum = __fmaf_rn(y, y, sum);
      }
      #pragma unroll
      for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
      const float scale = rsqrtf(sum / D + eps[0]);
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = lane + 32 * i;
        const float gate = static_cast<float>(z[e]);
        const float gated = (SILU ? gate : 1.0f) / (1.0f + expf(-gate));
        to[e] = static_cast<InT>(results[t][e] * scale * static_cast<float>(norm_w[e]) * gated);
      }
    }
    __syncthreads();
  }
  // The convolution's last inputs before what follows the saved state.
  const bool owner = head % (HV / HK) == 0;
  for (int j = tid; j < 3 * D; j += 512) {
    if (j < 2 * D && !owner) continue;
    const int c = channel(j);
    #pragma unroll
    for (int tap = 0; tap < TAPS - 1; ++tap) {
      conv_out[(($int64)seq * (TAPS - 1) + tap) * CHANNELS + c] =
          static_cast<InT>(input(save_at + tap - (TAPS - 1), c));
    }
  }
"""


def has_window_kernel(net: GatedDeltaNet) -> bool:
    """Return whether the kernel computes the layer."""
    return (
        net.head_k_dim == net.head_v_dim == HEAD_DIM
        and net.conv_kernel_size == TAPS
        and "bias" not in net.conv1d
    )


def window_constants(net: GatedDeltaNet, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    """Return the constants of a layer for the kernel, those beside the activations in `dtype`."""
    constants = (
        net.conv1d.weight.reshape(-1, TAPS).astype(dtype),
        net.A_log.astype(mx.float32),
        net.dt_bias.astype(mx.float32),
        net.norm.weight.astype(dtype),
        mx.array([net.norm.eps]),
    )
    mx.eval(constants)
    return constants


def recurrence_of(
    kernel: WindowKernel, net: GatedDeltaNet, dtype: mx.Dtype, *, silu: bool = True
) -> Recurrence:
    """Return a layer as `kernel` takes it, with activations of `dtype`. The gate of its output is `silu` or sigmoid."""
    heads = GatedDeltaShape(net.num_k_heads, net.num_v_heads, silu)
    return Recurrence(kernel, heads, window_constants(net, dtype))


def window_kernel(language: type[SourceKernel]) -> WindowKernel:
    """Return the kernel in `language`. It is compiled when it first runs."""
    kernel = language("gated_delta_window", INPUTS, OUTPUTS, SOURCE)

    def gated_delta_window(
        shape: GatedDeltaShape,
        rows: mx.array,
        past: mx.array,
        conv: mx.array,
        state: mx.array,
        spans: mx.array,
        constants: tuple[mx.array, ...],
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Run `spans` int32 `[n, 6]`. Return outputs `[rows, value_heads * 128]`, and the saved states.

        A span has the slot of a state, start and number of its past rows, and start and number of the new ones. Then
        comes the number of tokens after which the state is saved. `rows` and `past` are `[any, shape.row]`. The slots
        index `conv [slots, 3, channels]` and `state [slots, value_heads, 128, 128]`. `constants` are those of
        `window_constants`. Rows that no span names are not written.
        """
        count, heads = spans.shape[0], shape.value_heads
        sizes = [("HK", shape.key_heads), ("HV", heads), ("TAPS", TAPS), ("SILU", int(shape.silu))]
        out, conv_out, state_out = kernel(
            [rows, past, conv, state, spans, *constants],
            blocks=(heads, count, 1),
            threads=THREADS,
            template=[("InT", rows.dtype), *sizes],
            shapes=[
                (rows.shape[0], heads * HEAD_DIM),
                (count, TAPS - 1, shape.channels),
                (count, heads, HEAD_DIM, HEAD_DIM),
            ],
            dtypes=[rows.dtype, rows.dtype, mx.float32],
        )
        return out, conv_out, state_out

    return gated_delta_window
