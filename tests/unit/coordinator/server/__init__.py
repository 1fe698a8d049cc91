"""Unit tests of `coordinator/server`."""
