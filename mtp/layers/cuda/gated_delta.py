"""The window kernel of GatedDeltaNet in CUDA."""

from mtp.layers.cuda.kernel import CudaKernel
from mtp.layers.gated_delta import window_kernel

gated_delta_window = window_kernel(CudaKernel)
