"""Kernels for MLX's CUDA backend. Each replaces mlx-lm operations, which stay as its reference."""
