"""Checkpoints: configs, headers, names and weights of Qwen3.5/3.6/3.8, Flash-Next and Qwen3-Next, raw or converted by mlx-lm."""
