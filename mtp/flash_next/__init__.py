"""Qwen3.8-Flash-Next: its description, modules, states and layers."""
