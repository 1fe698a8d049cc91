"""Kernels for MLX's CUDA backend, and faster forms for its CPU backend. mlx-lm's operations stay as their reference."""
