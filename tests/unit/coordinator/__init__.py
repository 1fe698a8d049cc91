"""Unit tests of `coordinator`."""
