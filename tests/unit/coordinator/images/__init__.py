"""Unit tests of `coordinator/cli`."""
