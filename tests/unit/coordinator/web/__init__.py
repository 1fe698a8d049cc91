"""Unit tests of `coordinator/web`."""
