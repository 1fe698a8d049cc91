"""Qwen3.5 checkpoints on disk: config, headers, tensor names, parts, lazy weights."""
