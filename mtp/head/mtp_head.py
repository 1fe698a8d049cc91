"""The MTP head: one full-attention decoder layer between norms, predicting the token after next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs

from mtp.layers.kv_cache import KVRows
from mtp.layers.layer import Hole, Layer
from mtp.layers.reference.attention import AttentionLayer


class MTPHead(nn.Module):
    """The modules of the head, with their names within `mtp.`. lm_head and embedding are those of the backbone.

    `fc` maps `[…, 2H]`, embedding first, to `[…, H]`.
    """

    def __init__(self, args: TextModelArgs) -> None:
        super().__init__()
        hidden = args.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden, eps=args.rms_norm_eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden, eps=args.rms_norm_eps)
        # With an interval of 1 every layer is a full-attention one.
        self.layers = [DecoderLayer(replace(args, full_attention_interval=1), layer_idx=0)]
        self.norm = nn.RMSNorm(hidden, eps=args.rms_norm_eps)
        self._block: Layer | None = None

    @property
    def block(self) -> Layer:
        """The decoder layer: the reference, or the variant that was set."""
        return AttentionLayer(self.layers[0]) if self._block is None else self._block

    @block.setter
    def block(self, layer: Layer) -> None:
        """Set the variant that computes the decoder layer."""
        self._block = layer

    @property
    def dtype(self) -> mx.Dtype:
        """Type of the activations: that of the norms."""
        return self.norm.weight.dtype

    def advance(
        self,
        embedded: mx.array,
        hidden: mx.array,
        caches: Sequence[KVRows],
        widths: Sequence[int],
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        """Compute pairs as flat rows: `embedded[i]` of token t+1 and `hidden[i]` of token t, both `[rows, hidden]`.

        `hidden` is the backbone's state after its final norm, or the head's own output in a chain of drafts. Sequence i
        owns the next `widths[i]` rows, which are appended to `caches[i]`. Returns `[rows, hidden]` after `norm`, the
        input of lm_head for token t+2.
        """
        e = self.pre_fc_norm_embedding(embedded)
        h = self.pre_fc_norm_hidden(hidden)
        x = self.fc(mx.concatenate([e, h], axis=-1))
        out: mx.array = self.norm(self.block.add(x, caches, widths, holes=holes))
        return out
