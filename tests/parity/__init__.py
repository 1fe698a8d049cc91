"""Tests of our arithmetic against mlx-lm and transformers."""
