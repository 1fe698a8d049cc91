"""The layers of Apple GPUs and CPUs: fused products in any format, and on Apple GPUs kernels of this project."""
