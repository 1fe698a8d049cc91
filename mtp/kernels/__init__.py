"""Kernels that this project brings for MLX's CUDA backend, each beside the mlx-lm operations it stands for."""
