"""Unit tests of `coordinator/schedule`."""
