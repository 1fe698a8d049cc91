"""Checkpoints: configs, headers, names and weights of all families, raw or converted by mlx-lm."""
