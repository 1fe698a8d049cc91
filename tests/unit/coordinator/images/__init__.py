"""Unit tests of `coordinator/images`."""
