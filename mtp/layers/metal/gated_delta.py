"""The window kernel of GatedDeltaNet in Metal."""

from mtp.layers.gated_delta import window_kernel
from mtp.layers.metal.kernel import MetalKernel

gated_delta_window = window_kernel(MetalKernel)
