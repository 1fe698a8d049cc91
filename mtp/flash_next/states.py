"""The states of a sequence in a Flash-Next layer: keys with an index, and the n-grams and convolution of a PLE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mtp.flash_next.modules import PerLayerEmbedding
from mtp.flash_next.ngrams import Ints
from mtp.layers.kv_cache import PlainKV
from mtp.layers.layer import LayerCache, checked_state
from proto.errors import ProtocolError

Pool = Callable[[mx.array, int], mx.array]
"""The keys of blocks `[n, dim]`, of raw keys `[n x block, dim]` and the number of the first block."""


class IndexedKV(PlainKV):
    """Keys and values with the raw keys of the indexer, `[1, 1, room, dim]`, and the keys of whole blocks.

    A block's key depends on the tokens of the block alone, so the keys of blocks that are whole after a trim stay.
    """

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block
        self.index: mx.array | None = None
        self._blocks: mx.array | None = None

    def append_index(self, keys: mx.array) -> None:
        """Append the raw keys `[width, dim]` of the tokens that follow. Call it before `update_and_fetch`."""
        end = self.offset + keys.shape[0]
        if self.index is None or self.index.shape[2] < end:
            room = -(-end // self.step) * self.step
            grown = mx.zeros((1, 1, room, keys.shape[1]), keys.dtype)
            if self.index is not None:
                grown[:, :, : self.offset] = self.index[:, :, : self.offset]
            self.index = grown
        self.index[0, 0, self.offset : end] = keys

    def block_keys(self, pool: Pool) -> mx.array | None:
        """Return the keys `[n, dim]` of all whole blocks, None if there are none."""
        whole = self.offset // self.block
        known = 0 if self._blocks is None else min(whole, self._blocks.shape[0])
        if whole > known:
            assert self.index is not None, "it has the tokens of these blocks"
            new = pool(self.index[0, 0, known * self.block : whole * self.block], known)
            old = [] if self._blocks is None else [self._blocks[:known]]
            self._blocks = mx.concatenate([*old, new])
        return None if self._blocks is None or not whole else self._blocks[:whole]

    def trim(self, n: int) -> int:
        """Remove the last `n` tokens. Return how many there were."""
        trimmed = super().trim(n)
        if self._blocks is not None:
            self._blocks = self._blocks[: self.offset // self.block]
        return trimmed

    def arrays(self) -> list[mx.array]:
        blocks = [] if self._blocks is None else [self._blocks]
        return [] if self.index is None else [*super().arrays(), self.index, *blocks]

    def _parts(self, start: int = 0) -> list[mx.array]:
        assert self.index is not None, "there are tokens"
        return [*super()._parts(start), self.index[:, :, start : self.offset]]

    def _set_parts(self, parts: Sequence[mx.array]) -> None:
        if len(parts) != 3:
            raise ProtocolError(f"{len(parts)} arrays of keys, values and the index, expected 3")
        super()._set_parts(parts[:2])
        self.index = parts[2]

    def _empty(self) -> IndexedKV:
        return IndexedKV(self.block)


@dataclass(frozen=True)
class _NgramTape:
    """The state before a window, and its tokens and rows of the convolution."""

    context_before: Ints
    rows_before: mx.array
    tokens: Ints
    rows: mx.array


@dataclass
class NgramState:
    """The last tokens and the last rows `[1, n, width]` of the convolution of a PLE, with tapes of open windows."""

    context: Ints
    rows: mx.array
    tapes: list[_NgramTape] = field(default_factory=list)

    @classmethod
    def empty(cls, ple: PerLayerEmbedding, dtype: mx.Dtype) -> NgramState:
        """Return the state before the first token."""
        context = np.full(ple.hash.context, ple.ngrams.eos, np.int64)
        before = (ple.ngrams.kernel - 1) * ple.ngrams.size  # rows that the convolution reads
        return cls(context, mx.zeros((1, before, ple.args.width), dtype))

    def advance(self, tokens: Ints, rows: mx.array, *, keep: bool) -> None:
        """Append `tokens` and their `rows [1, w, width]`. With `keep` the window can be cut later."""
        if keep:
            self.tapes.append(_NgramTape(self.context, self.rows, tokens, rows))
        self.context = np.concatenate([self.context, tokens])[-len(self.context) :]
        held = self.rows.shape[1]
        # A contiguous copy, since a view would keep the rows of the whole chunk in memory.
        self.rows = mx.contiguous(mx.concatenate([self.rows, rows], axis=1)[:, -held:])

    def apply_commit(self, whole: int, cut: int | None) -> None:
        """See `LayerCache.apply_commit`."""
        if cut is None:
            del self.tapes[:whole]
            return
        tape = self.tapes[whole]
        self.tapes.clear()
        self.context, self.rows = tape.context_before, tape.rows_before
        if cut:
            self.advance(tape.tokens[:cut], tape.rows[:, :cut], keep=False)

    def arrays(self) -> list[mx.array]:
        """Return the state as arrays. Token ids are uint32 on the wire and on disk."""
        return [self.rows, mx.array(self.context.astype(np.uint32))]


@dataclass
class NgramGDNCache(LayerCache):
    """The state of a layer with a PLE. `gdn` is that of its GatedDeltaNet, of the variant that computes it."""

    gdn: Any
    ngrams: NgramState
    coming: Ints | None = None

    def take_coming(self, width: int) -> Ints:
        """Return the tokens of the next `width` rows. Raises ProtocolError if the stage does not know them."""
        tokens, self.coming = self.coming, None
        if tokens is None or len(tokens) != width:
            raise ProtocolError(f"a layer with n-grams has no tokens for {width} rows")
        return tokens

    def apply_commit(self, whole: int, cut: int | None, trim: int) -> None:
        self.gdn.apply_commit(whole, cut, trim)
        self.ngrams.apply_commit(whole, cut)

    def copy(self) -> NgramGDNCache:
        """Return an independent copy."""
        ngrams = NgramState(self.ngrams.context, mx.contiguous(self.ngrams.rows))
        return NgramGDNCache(self.gdn.copy(), ngrams)

    def arrays(self) -> list[mx.array]:
        return [*self.gdn.arrays(), *self.ngrams.arrays()]

    @property
    def nbytes(self) -> int:
        """Bytes of the present state."""
        return int(self.gdn.nbytes) + sum(array.nbytes for array in self.ngrams.arrays())

    def backup_arrays(self, start: int) -> tuple[bool, list[mx.array]]:
        return False, self.copy().arrays()

    def filled(self, states: Sequence[Sequence[mx.array]], length: int) -> NgramGDNCache:
        conv, state, rows, context = checked_state(states[-1], self.arrays())
        ngrams = NgramState(np.array(context).astype(np.int64), rows)
        return replace(self, gdn=self.gdn.filled([[conv, state]], length), ngrams=ngrams)
