"""Kernels for MLX's CUDA backend. Each has the same results as the mlx-lm operations that it replaces."""
