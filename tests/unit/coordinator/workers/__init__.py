"""Unit tests of `coordinator/workers`."""
