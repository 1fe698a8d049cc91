"""Weights that other programs packed: their values, the same bits in MLX's formats, and layers for them."""
