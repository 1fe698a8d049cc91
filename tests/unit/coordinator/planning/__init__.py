"""Unit tests of `coordinator/planning`."""
