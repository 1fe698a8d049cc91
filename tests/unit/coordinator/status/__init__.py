"""Unit tests of `coordinator/status`."""
