"""Unit tests of `coordinator/generation`."""
