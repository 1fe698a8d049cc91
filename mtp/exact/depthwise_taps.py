"""The depthwise convolution of a GatedDeltaNet layer as a sum over its taps."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


class DepthwiseTaps(nn.Module):
    """A causal depthwise convolution without bias, computed element by element.

    Libraries of a GPU choose an algorithm for a convolution by its length and its batch. This sum has one order.
    """

    def __init__(self, convolution: nn.Conv1d) -> None:
        super().__init__()
        self.weight = convolution.weight

    def __call__(self, x: mx.array) -> mx.array:
        """Return the convolution of `x [n, width + taps - 1, channels]`: `[n, width, channels]`, summed in fp32."""
        taps = self.weight.shape[1]
        width = x.shape[1] - taps + 1
        y = mx.zeros((1,), mx.float32)
        for tap in range(taps):
            part = x[:, tap : tap + width].astype(mx.float32)
            y = y + part * self.weight[:, tap, 0].astype(mx.float32)
        return y.astype(x.dtype)


def is_depthwise(module: object) -> bool:
    """Return whether `DepthwiseTaps` computes `module`: one group for each channel, stride 1, no padding, no bias."""
    return (
        isinstance(module, nn.Conv1d)
        and module.groups == module.weight.shape[0]
        and (module.stride, module.padding, module.dilation) == (1, 0, 1)
        and "bias" not in module
    )
