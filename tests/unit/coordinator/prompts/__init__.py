"""Unit tests of `coordinator/prompts`."""
