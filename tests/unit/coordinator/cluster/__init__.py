"""Unit tests of `coordinator/cluster`."""
