"""The layers computed by modules of mlx-lm. All other variants are compared with these."""

from mlx_lm.models.qwen3_5 import DecoderLayer

from mtp.layers.layer import REFERENCE as REFERENCE
from mtp.layers.reference.attention import AttentionLayer
from mtp.layers.reference.gdn import GDNLayer

ReferenceLayer = AttentionLayer | GDNLayer


def reference_layer(layer: DecoderLayer) -> ReferenceLayer:
    """Return a loaded layer of mlx-lm behind the interface of this project."""
    return GDNLayer(layer) if layer.is_linear else AttentionLayer(layer)
