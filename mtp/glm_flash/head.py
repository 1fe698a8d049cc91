"""The MTP head of GLM-5.3-Flash: a layer of latent attention and experts with one residual stream.

Its input is the model's state after the final norm, and in a chain of drafts its own output, as in vLLM and SGLang.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from mtp.glm_flash.args import GlmArgs
from mtp.glm_flash.layers import GlmLayer
from mtp.glm_flash.modules import DecoderLayer
from mtp.head.drafter import MTPHead
from mtp.layers.layer import Layer


class GlmHead(MTPHead):
    """The modules of the head, with their names within `mtp.`."""

    drafts_on_device = False

    def __init__(self, args: GlmArgs) -> None:
        nn.Module.__init__(self)
        self.fc = nn.Linear(2 * args.hidden, args.hidden, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(args.hidden, eps=args.eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(args.hidden, eps=args.eps)
        layer: Any = DecoderLayer(args, 0, linear=False, streams=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(args.hidden, eps=args.eps)
        self._block: Layer | None = None

    def _reference(self) -> Layer:
        layer: Any = self.layers[0]
        self._block = GlmLayer(layer)
        return self._block
