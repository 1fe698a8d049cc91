"""The MTP head of Flash-Next: it reads and writes all residual streams, and a mixer makes the input of lm_head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import TextModelArgs

from mtp.flash_next.args import FlashNextArgs
from mtp.flash_next.layers import stream_layer
from mtp.flash_next.modules import FlashNextLayer, HyperConnection
from mtp.head.drafter import MTPHead
from mtp.layers.kv_cache import KVRows
from mtp.layers.layer import Hole, Layer


class FlashNextHead(MTPHead):
    """The modules of the head, with their names within `mtp.`.

    The hidden state of a token is that of all streams after the last layer, before the final mixer.
    """

    reads_streams = True

    def __init__(self, fields: TextModelArgs, args: FlashNextArgs) -> None:
        nn.Module.__init__(self)
        self.streams = args.streams
        self.pre_fc_norm_embedding = nn.RMSNorm(args.hidden, eps=args.eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(args.width, eps=args.eps)
        self.fc_embedding = nn.Linear(args.hidden, args.hidden, bias=False)
        self.fc_hidden = nn.Linear(args.hidden, args.hidden, bias=False)
        # With an interval of 1 every layer is one of sparse attention.
        one = replace(fields, full_attention_interval=1)
        layer: Any = FlashNextLayer(one, replace(args, ngrams=None), 0)
        self.layers = [layer]
        self.hyper_connection_mixer = HyperConnection(args, injects=False)
        self._block: Layer | None = None

    def _reference(self) -> Layer:
        layer: Any = self.layers[0]
        self._block = stream_layer(layer)
        return self._block

    @property
    def width(self) -> int:
        """Values of a hidden state: those of all streams."""
        return int(self.pre_fc_norm_hidden.weight.shape[0])

    def advance(
        self,
        embedded: mx.array,
        hidden: mx.array,
        caches: Sequence[KVRows],
        widths: Sequence[int],
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        """See `MTPHead.advance`. `hidden` and the returned rows have all streams."""
        token = self.fc_embedding(self.pre_fc_norm_embedding(embedded))
        streams = self.pre_fc_norm_hidden(hidden).reshape(hidden.shape[0], self.streams, -1)
        x = (token[:, None] + self.fc_hidden(streams)).reshape(hidden.shape)
        return self.block.forward(x, caches, widths, holes=holes)

    def output(self, rows: mx.array) -> mx.array:
        mixed: mx.array = self.hyper_connection_mixer(rows)
        return mixed
