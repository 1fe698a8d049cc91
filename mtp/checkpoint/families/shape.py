"""The sizes of a model's layers and states as plain data, from which plans, limits and reports are made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mtp.layers.layer import KVFormat

STOCK_LAUNCHES = 24.75
"""Launches of a layer of Qwen3.5 in mlx-lm, for a token of one stream (tests/parity/test_kernel_count.py)."""

ACCEPTED = (0.83, 0.78, 0.75, 0.70, 0.68, 0.66, 0.65)
"""The share of each draft of a window that is right after right ones (docs/MTP_HEAD.md)."""


@dataclass(frozen=True)
class LayerShape:
    """The state of a layer. `kind` is its name for people.

    A layer that reads the tokens of its rows belongs to the first stage. `reads_tokens` is the field that says so.

    A token adds `token_values`. A sequence has `sequence_values` in the type of activations, and `fixed_bytes` in
    fp32 whatever this type is.
    """

    kind: str
    token_values: int = 0
    sequence_values: int = 0
    fixed_bytes: int = 0
    reads_tokens: str = ""

    def token_bytes(self, itemsize: int, kv_format: KVFormat) -> int:
        """Return the bytes of a token's K/V; an element of activations has `itemsize` bytes."""
        if kv_format.bits:  # each group has a scale and a bias
            groups = self.token_values // kv_format.group_size
            return self.token_values * kv_format.bits // 8 + groups * 2 * itemsize
        return self.token_values * itemsize

    def sequence_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence, whatever its length."""
        return self.sequence_values * itemsize + self.fixed_bytes


@dataclass(frozen=True)
class Shape:
    """The layers of a model, or of a member's share of it, and the layer of its MTP head, None without one.

    A row between two stages has `streams` residual streams of `hidden` values. A token reads `routed_share` of the
    experts. A layer has `launches`, as a multiple of STOCK_LAUNCHES. `can_cut` is true if members of a group can hold
    shares of a layer, `quantizes_kv` if K/V can be stored in 4 or 8 bits. The head has the shares `accepted`.
    """

    hidden: int
    layers: tuple[LayerShape, ...]
    head: LayerShape | None = None
    streams: int = 1
    routed_share: float = 1.0
    launches: float = 1.0
    can_cut: bool = True
    quantizes_kv: bool = True
    accepted: tuple[float, ...] = ACCEPTED

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return tuple(layer.kind for layer in self.layers)

    @property
    def hop_width(self) -> int:
        """Values of a row between two layers."""
        return self.streams * self.hidden

    @cached_property
    def token_layers(self) -> tuple[int, ...]:
        """The layers that read the tokens of their rows."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.reads_tokens)

    @property
    def twin(self) -> int | None:
        """The last layer of the kind that the MTP head has, None without one."""
        kind = self.head.kind if self.head else ""
        return max((number for number, layer in enumerate(self.layers) if layer.kind == kind), default=None)
