"""Unit tests of `coordinator/depth`."""
