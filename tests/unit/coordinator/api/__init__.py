"""Unit tests of `coordinator/api`."""
