"""The layers by kernels for NVIDIA GPUs. On a Mac nothing of this folder runs."""
