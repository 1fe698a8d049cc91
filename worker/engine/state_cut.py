"""The state of a layer in a group: the shares of all members as one, and the share of one member.

Keys and values are cut by heads, and a GatedDeltaNet by its key heads and their value heads, as the weights are: see
`mtp.checkpoint.format.cut`.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mtp.checkpoint.format.config import LayerKind, ModelConfig
from proto.errors import ProtocolError

Arrays = list[mx.array]
"""The state of a layer: arrays `[1, heads, …]` of an attention layer, or `conv [1, taps, q k v]` and `state
[1, value_heads, …]` of a GatedDeltaNet."""


class StateCut:
    """The part of a state that a member of a group holds. `config` is that of its layers."""

    def __init__(self, config: ModelConfig) -> None:
        whole = config.whole or config
        self.cut = config.cut
        self._kv_heads = whole.num_kv_heads
        self._keys = whole.gdn_key_heads * whole.gdn_key_dim

    def own_share(self, shares: Sequence[Arrays], kind: LayerKind) -> Arrays:
        """Return this member's share of a state that the members of any group made. Raises ProtocolError."""
        if len(shares) == self.cut.size:
            return shares[self.cut.rank]
        try:
            if kind == "attention":
                return self._heads_of(shares)
            convs, states = zip(*shares, strict=True)
            sections = zip(*(self._sections(conv, len(shares)) for conv in convs), strict=True)
            own = [self._part(mx.concatenate(list(s), axis=-1), -1) for s in sections]
            state = self._part(mx.concatenate(list(states), axis=1), 1)
            return [mx.concatenate(own, axis=-1), state]
        except ValueError as error:
            raise ProtocolError(f"the shares of a backup do not fit together: {error}") from error

    def _heads_of(self, shares: Sequence[Arrays]) -> Arrays:
        # In a group of more members than heads, neighbours hold the same head.
        held = shares[:: max(1, len(shares) // self._kv_heads)]
        wholes = [mx.concatenate(list(parts), axis=1) for parts in zip(*held, strict=True)]
        first = self.cut.rank * self._kv_heads // self.cut.size
        count = max(1, self._kv_heads // self.cut.size)
        return [whole[:, first : first + count] for whole in wholes]

    def _sections(self, conv: mx.array, size: int) -> list[mx.array]:
        """Return the channels of queries, keys and values of a member of a group of `size`."""
        keys = self._keys // size
        return [conv[..., :keys], conv[..., keys : 2 * keys], conv[..., 2 * keys :]]

    def _part(self, whole: mx.array, axis: int) -> mx.array:
        return mx.split(whole, self.cut.size, axis=axis)[self.cut.rank]
