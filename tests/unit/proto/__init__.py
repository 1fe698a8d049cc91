"""Unit tests of `proto`."""
