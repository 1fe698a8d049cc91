"""Keys and values that a kernel writes into the memory of their cache, on NVIDIA GPUs.

MLX copies an array before it changes a part of it, if unfinished work reads the array. A step that begins before the
one before it has ended would copy whole caches. The kernel takes the array as an input, and writes behind the tokens
that anybody reads. MLX does not see that. So the kernel has a result of its own, `written`: everything in its graph
that reads these rows depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mtp.layers.cuda.packed_linear import FEW_ROWS
from mtp.layers.cuda.row_attention import SLOTS, RowArrays, no_pair
from mtp.layers.kv_cache import PairKV
from mtp.layers.prepare_rows import HEAD_DIM
from mtp.layers.source_kernel import CudaKernel

_SOURCE = r"""
  // One block a row. A warp copies the keys or the values of one head.
  const int lane = threadIdx.x & 31, row = blockIdx.x, rows = fresh_shape[2];
  const int slot = places[2 * row], place = spans[3 * row];
  const InT* const table[] = {PAIRS};
  InT* const pair = const_cast<InT*>(table[slot]);
  for (int head = threadIdx.x >> 5; head < 2 * HK; head += blockDim.x >> 5) {
    const InT* from = fresh + ((long long)head * rows + row) * D;
    InT* to = pair + ((long long)head * caps[slot] + place) * D;
    reinterpret_cast<uint4*>(to)[lane] = reinterpret_cast<const uint4*>(from)[lane];
  }
  if (row == 0 && threadIdx.x == 0) written[0] = 1;
"""


def _write_kernel(slots: int) -> CudaKernel:
    pairs, before = ([f"{name}{slot}" for slot in range(slots)] for name in ("pair", "before"))
    inputs = ["fresh", "places", "spans", "caps", *pairs, *before]
    source = _SOURCE.replace("PAIRS", ", ".join(pairs))
    return CudaKernel(f"attention_write{slots}", inputs, ["written"], source)


_write = {slots: _write_kernel(slots) for slots in (1, SLOTS)}


def write_rows(
    new: mx.array, rows: RowArrays, pairs: Sequence[mx.array], before: Sequence[mx.array]
) -> mx.array:
    """Write `new [2, kv_heads, rows, 256]` into the memory of `pairs`, up to `SLOTS`. Return int32 `[1]`, `written`.

    Each of `pairs [2, kv_heads, room, 256]` is a whole array in memory, and no row that somebody reads is written.
    `before` are arrays that must be computed first, one for each pair.
    """
    places, spans, caps, _ = rows
    slots = 1 if len(pairs) == 1 else SLOTS
    more = slots - len(pairs)
    inputs = [new, places, spans, caps, *pairs, *[no_pair(new.dtype)] * more]
    (written,) = _write[slots](
        [*inputs, *before, *[before[0]] * more],
        blocks=(new.shape[2], 1, 1),
        template=[("InT", new.dtype), ("HK", new.shape[1]), ("D", HEAD_DIM)],
        shapes=[(1,)],
        dtypes=[mx.int32],
    )
    return written


class InPlaceKV(PairKV):
    """A cache whose array `write_rows` may change. Every other use of the array comes after that in the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.written: mx.array | None = None
        """The result of the newest `write_rows`."""
        self._whole = False
        """True if the array has memory of its own, in its order."""

    def copied_nbytes(self, rows: int) -> int:
        return 0 if rows <= FEW_ROWS else self.nbytes

    def takes(self, new: mx.array) -> bool:
        """Return whether `write_rows` may write rows as those of `new` into the array, after `reserve`."""
        pair, kind = self.pair, (*new.shape[:2], new.shape[3], new.dtype)
        known = pair is not None and (*pair.shape[:2], pair.shape[3], pair.dtype) == kind
        return known and self._whole

    def add_rows(self, width: int, written: mx.array) -> None:
        """Count `width` rows that `write_rows` writes, with its result."""
        self.offset += width
        self.written = written

    def reserve(self, width: int, kv_heads: int, dim: int, dtype: mx.Dtype) -> None:
        if self.offset + width > self.room:
            self._settle()
            self._whole = self.pair is not None  # zeros may be a single number in memory
            super().reserve(width, kv_heads, dim, dtype)

    def write(self, new: mx.array) -> mx.array:
        self._settle()
        pair = super().write(new)
        self._whole = new.shape[2] < self.room  # else it is `new`, perhaps a part of another array
        return pair

    def arrays(self) -> list[mx.array]:
        return [*super().arrays(), *([] if self.written is None else [self.written])]

    def _settle(self) -> None:
        """Start the work up to the newest row. A graph that begins later runs after it, though MLX sees no reason."""
        if self.written is not None:
            mx.async_eval(self.written)
            self.written = None

    def _parts(self, start: int = 0) -> list[mx.array]:
        self._settle()
        return super()._parts(start)

    def _set_parts(self, parts: Sequence[mx.array]) -> None:
        super()._set_parts(parts)
        self._whole = True

    def _empty(self) -> InPlaceKV:
        return InPlaceKV()
