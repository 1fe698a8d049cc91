"""The MTP head of GLM-5.3-Flash: a layer of latent attention and experts with one residual stream.

Its input is the model's state after the final norm, and in a chain of drafts its own output, as in vLLM and SGLang.
"""

from __future__ import annotations

from mlx_lm.models.qwen3_5 import TextModelArgs

from mtp.glm_flash.args import GlmArgs
from mtp.glm_flash.layers import GlmLayer
from mtp.glm_flash.modules import DecoderLayer
from mtp.head.drafter import MTPHead
from mtp.layers.layer import Layer


class GlmHead(MTPHead):
    """The modules of the head, with their names within `mtp.`."""

    def __init__(self, fields: TextModelArgs, args: GlmArgs) -> None:
        super().__init__(fields, DecoderLayer(args, 0, linear=False, streams=False))

    def _reference(self) -> Layer:
        self._block = GlmLayer(self.layers[0])
        return self._block
