"""Unit tests of `coordinator/pipeline`."""
